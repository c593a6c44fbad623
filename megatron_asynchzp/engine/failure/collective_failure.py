# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The one line that a failed collective ends a run with."""

# torch appends C++ frames to some of its messages, after these words.
_CPP_TRACE = "Exception raised from"

# Words of gloo and NCCL for a peer whose process has ended.
_PEER_ENDED = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")


class CollectiveFailure(RuntimeError):
    """Raised if a collective fails or is late; the message names the missing ranks, too."""

    @classmethod
    def of(cls, title: str, error: BaseException) -> "CollectiveFailure":
        reason = " ".join(str(error).partition(_CPP_TRACE)[0].split())
        if any(words in reason for words in _PEER_ENDED):
            reason = f"a peer has ended ({reason})"
        if not reason or not isinstance(error, (RuntimeError, TimeoutError)):
            reason = f"{type(error).__name__} {reason}".rstrip()
        failure = cls(f"{title} failed: {reason}")
        failure.__cause__ = error
        return failure

    def add(self, words: str) -> None:
        self.args = (f"{self}; {words}",)
