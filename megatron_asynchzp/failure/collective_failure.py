# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the one line that a failed collective ends a run with."""

# torch appends the C++ frames to some of its messages, behind these words.
_CPP_TRACE = "Exception raised from"

# How gloo and NCCL say that the process at the other end is gone.
_PEER_ENDED = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")


class CollectiveFailure(RuntimeError):
    """A collective failed or took too long; the message names operation, unit, ranks and step, and,
    where a driver has somebody to ask, which ranks are missing."""

    @classmethod
    def of(cls, title: str, error: BaseException) -> "CollectiveFailure":
        """Report `error` in one line about what has this title."""
        reason = " ".join(str(error).partition(_CPP_TRACE)[0].split())
        if any(words in reason for words in _PEER_ENDED):
            reason = f"a peer has ended ({reason})"
        if not reason or not isinstance(error, (RuntimeError, TimeoutError)):
            reason = f"{type(error).__name__} {reason}".rstrip()
        failure = cls(f"{title} failed: {reason}")
        failure.__cause__ = error
        return failure

    def add(self, words: str) -> None:
        """Add words to the message."""
        self.args = (f"{self}; {words}",)
