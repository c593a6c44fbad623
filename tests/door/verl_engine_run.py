# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs verl's own engine class for Megatron as an actor of PPO: log-probabilities, two updates with
verl's loss, offloading and loading between them, checkpoints, and the weights for a generator.

torchrun ... -m tests.door.verl_engine_run OUT.json CALLS, with CALLS as JSON: names of methods of
Actor and their arguments. AsyncHZP comes by verl's module, if at all. Nothing of verl is changed.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.door.te_cpu import prepare

NUM_ROWS, UPDATES = 4, 2
OFF = (
    "masked_softmax_fusion bias_activation_fusion bias_dropout_fusion apply_rope_fusion "
    "gradient_accumulation_fusion persist_layer_norm moe_permute_fusion"
)


class Actor:
    """An engine with the model of `folder`, and its parameters and optimizer on the host."""

    def __init__(self, folder: str, clip: float = 1.0, **options: Any):
        from verl.trainer.config import CheckpointConfig  # pyright: ignore[reportMissingImports]
        from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig  # pyright: ignore[reportMissingImports]
        from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead  # pyright: ignore[reportMissingImports]

        self.engine = MegatronEngineWithLMHead(
            HFModelConfig(path=folder),
            McoreEngineConfig(
                param_offload=True,
                optimizer_offload=True,
                override_transformer_config={
                    "attention_backend": "unfused",
                    **dict.fromkeys(OFF.split(), False),
                },
                **options,
            ),
            McoreOptimizerConfig(
                lr=1e-3,
                clip_grad=clip,
                weight_decay=0.1,
                total_training_steps=10,
                lr_warmup_steps=1,
                use_checkpoint_opt_param_scheduler=True,
            ),
            CheckpointConfig(),
        )
        self.engine.initialize()

    def train(self, first: int, end: int) -> list[tuple[float, float]]:
        """Loss, summed over the world, and norm of each update."""
        from verl.workers.utils.padding import no_padding_2_padding  # pyright: ignore[reportMissingImports]

        steps = []
        for step in range(first, end):
            data, sizes = self._batch(step)
            with self.engine.eval_mode():
                inferred = self.engine.infer_batch(data, loss_function=_no_loss)
            own = self._by_replica(inferred)[self.engine.get_data_parallel_rank()]
            padded = no_padding_2_padding(own["model_output"]["log_probs"], data)
            data["old_log_probs"] = _nested([row[:n] for row, n in zip(padded, sizes)])
            for _ in range(UPDATES):
                with self.engine.train_mode():
                    output = self.engine.train_batch(data, _ppo_loss())
                    self.engine.lr_scheduler_step()
                outputs = self._by_replica(output)
                loss = sum(sum(outputs[replica]["loss"]) for replica in sorted(outputs))
                steps.append((loss, float(outputs[0]["metrics"]["grad_norm"])))
        return steps

    def _by_replica(self, output: dict) -> dict[int, dict]:
        """The output of one rank of each data parallel replica: verl gives others none."""
        import torch.distributed as dist

        own = (self.engine.get_data_parallel_rank(), output)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own if self.engine.is_mp_src_rank_with_outputs() else None)
        return dict(filter(None, found))

    def _batch(self, step: int) -> tuple[Any, list[int]]:
        """Prompts and answers of other lengths in each row, and the lengths of the answers."""
        import torch
        from tensordict import TensorDict  # pyright: ignore[reportMissingImports]
        from verl.utils import tensordict_utils as tu  # pyright: ignore[reportMissingImports]

        drawn = torch.Generator().manual_seed(step * 100 + self.engine.get_data_parallel_rank())
        prompt_sizes = torch.randint(1, 6, (NUM_ROWS,), generator=drawn).tolist()
        sizes = torch.randint(2, 9, (NUM_ROWS,), generator=drawn).tolist()
        prompts = [torch.randint(4, 100, (n,), generator=drawn) for n in prompt_sizes]
        answers = [torch.randint(4, 100, (n,), generator=drawn) for n in sizes]
        ones = _nested([torch.ones(n, dtype=torch.long) for n in sizes])
        rows = [torch.cat(pair) for pair in zip(prompts, answers)]
        fields = {
            "input_ids": _nested(rows),
            "position_ids": _nested([torch.arange(len(row)) for row in rows]),
            "prompts": _nested(prompts),
            "responses": _nested(answers),
            "response_mask": ones,
            "loss_mask": ones,
            "advantages": _nested([torch.randn(n, generator=drawn) for n in sizes]),
            "temperature": torch.ones(NUM_ROWS),
        }
        data = TensorDict(fields, batch_size=[NUM_ROWS])
        tu.assign_non_tensor(
            data,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=2,
            global_batch_size=NUM_ROWS * self.engine.get_data_parallel_size(),
        )
        return data, sizes

    def save(self, folder: str) -> None:
        self.engine.save_checkpoint(folder, global_step=1)

    def load(self, folder: str) -> None:
        self.engine.load_checkpoint(folder, del_local_after_load=False)

    def export(self, file: str) -> bool:
        """Write the weights for a generator; whether those for changes have the same elements."""
        import torch
        import torch.distributed as dist
        from safetensors.torch import save_file

        weights, _ = self.engine.get_per_tensor_param()
        exported = {name: value.clone() for name, value in weights}
        if dist.get_rank() == 0:
            save_file(exported, file)
        shards, _ = self.engine.get_per_tensor_param_shard()
        read = torch.cat([values.float() for _, values, _ in shards])
        sent = torch.cat([value.flatten().float() for value in exported.values()])
        return torch.equal(read.sort().values, sent.sort().values)

    def state(self) -> tuple[str, bool]:
        """The wrapper's name, and whether its model sleeps."""
        chunk = self.engine.module[0]
        return type(chunk).__name__, hasattr(chunk, "runtime") and chunk.runtime.is_asleep


def _nested(rows: list) -> Any:
    import torch

    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _no_loss(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Any, dict]:
    return model_output["log_probs"].values().sum() * 0.0, {}


def _ppo_loss() -> Any:
    from functools import partial

    from verl.workers.config import ActorConfig  # pyright: ignore[reportMissingImports]
    from verl.workers.utils.losses import ppo_loss  # pyright: ignore[reportMissingImports]

    config = ActorConfig(
        strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=2, ppo_mini_batch_size=8
    )
    return partial(ppo_loss, config)


def main(out: Path, calls: list) -> None:
    """Write what each call returns; "new" makes another actor, with these arguments."""
    prepare()
    import torch.distributed as dist

    dist.init_process_group("gloo")
    import verl  # noqa: F401  loads its modules  # pyright: ignore[reportMissingImports]

    results, actor = [], None
    for name, *args in calls:
        if name == "new":
            actor = Actor(args[0], **args[1])
            results.append(None)
        else:
            results.append(getattr(actor, name)(*args))
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"results": results}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
