"""The runner in the engine: shapes that the arithmetic meets, and what padding must not change."""

from __future__ import annotations

import asyncio
from pathlib import Path

from torch import Tensor

from structgen import Engine
from structgen.core.batch import Batch, Picked
from structgen.engine.runner import Runner
from structgen.grammar.matcher import Mask
from structgen.models.linear import padded_rows


class Recording:
    """A computer that notes how many rows each product has."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.rows: set[int] = set()

    def forward(self, batch: Batch) -> Tensor:
        self.rows.add(len(batch.tokens_t))
        logits_rv = self._runner.forward(batch)
        assert len(logits_rv) == len(batch.logit_rows_r)
        self.rows.add(logits_rv.untyped_storage().nbytes() // (logits_rv.shape[1] * 4))
        return logits_rv

    def pick(self, logits_rv: Tensor, batch: Batch, mask: Mask | None = None) -> Picked:
        return self._runner.pick(logits_rv, batch, mask)


class TestEveryStep:
    async def test_multiplies_one_of_few_numbers_of_rows(self, tiny_model: Path) -> None:
        async with Engine(tiny_model, slots=3000, threads=1) as engine:
            engine._loop._computer = recording = Recording(engine.loaded.runner)
            await asyncio.gather(
                *(
                    engine.generate("x" * length, max_tokens=length, prompt_logprobs=length // 2)
                    for length in range(1, 60, 3)
                )
            )

        assert len(recording.rows) > 3
        assert {rows for rows in recording.rows if padded_rows(rows) != rows} == set()
