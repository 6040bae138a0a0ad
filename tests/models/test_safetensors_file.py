"""Reading of safetensors: one file or shards, and files that are not what they should be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from structgen.errors import CheckpointError
from structgen.models.safetensors_file import SafetensorsSource
from tests.models.families import CASES, loaded, oracle, relative_error, saved, tokens
from tests.models.harness import logits_of

INDEX = "model.safetensors.index.json"


class TestShards:
    def test_load_as_one_file_does(self, tmp_path: Path) -> None:
        model = saved(CASES["qwen3"], tmp_path, max_shard_size="20KB")

        ours = logits_of(loaded(tmp_path), tokens())

        assert len(list(tmp_path.glob("*.safetensors"))) > 2
        assert relative_error(ours, oracle(model, tokens())) < 2e-5

    def test_that_are_missing_are_named(self, tmp_path: Path) -> None:
        saved(CASES["llama"], tmp_path, max_shard_size="20KB")
        lost = sorted(tmp_path.glob("*.safetensors"))[1]
        lost.unlink()

        with pytest.raises(CheckpointError, match=f"'{lost.name}', which is not beside it"):
            SafetensorsSource(tmp_path)

    def test_outside_of_the_directory_are_not_opened(self, tmp_path: Path) -> None:
        save_file({"x": torch.ones(1)}, tmp_path / "outside.safetensors")
        inside = tmp_path / "inside"
        inside.mkdir()
        (inside / INDEX).write_text(json.dumps({"weight_map": {"x": "../outside.safetensors"}}))

        with pytest.raises(CheckpointError, match=r"'\.\./outside\.safetensors', which is not"):
            SafetensorsSource(inside)

    def test_that_lack_what_the_index_promises_are_refused(self, tmp_path: Path) -> None:
        save_file({"x": torch.ones(1)}, tmp_path / "a.safetensors")
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"y": "a.safetensors"}}))

        with pytest.raises(CheckpointError, match=r"places y in a\.safetensors, which does not"):
            SafetensorsSource(tmp_path)

    def test_that_repeat_a_tensor_are_refused(self, tmp_path: Path) -> None:
        save_file({"x": torch.ones(1)}, tmp_path / "a.safetensors")
        save_file({"x": torch.ones(1), "y": torch.ones(1)}, tmp_path / "b.safetensors")
        shard_of = {"x": "a.safetensors", "y": "b.safetensors"}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": shard_of}))

        with pytest.raises(CheckpointError, match=r"x is both in .*a\.safetensors and in .*b\."):
            SafetensorsSource(tmp_path)

    @pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
    def test_with_a_broken_index_are_refused(self, tmp_path: Path, content: str) -> None:
        (tmp_path / INDEX).write_text(content)

        with pytest.raises(CheckpointError, match="is not a safetensors index"):
            SafetensorsSource(tmp_path)


class TestFile:
    def test_that_is_cut_short_is_refused_with_its_path(self, tmp_path: Path) -> None:
        saved(CASES["llama"], tmp_path)
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])

        with pytest.raises(CheckpointError, match=f"{path} is damaged"):
            SafetensorsSource(tmp_path)

    def test_of_another_kind_is_refused_with_its_path(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        path.write_text("version https://git-lfs.github.com/spec/v1")

        with pytest.raises(CheckpointError, match=f"{path} is damaged"):
            SafetensorsSource(tmp_path)

    def test_is_looked_for_by_name(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"has no model\.safetensors and no"):
            SafetensorsSource(tmp_path)

    def test_of_pickled_weights_is_not_read_but_named(self, tmp_path: Path) -> None:
        (tmp_path / "pytorch_model.bin").touch()

        with pytest.raises(CheckpointError, match="convert them to safetensors"):
            SafetensorsSource(tmp_path)


class TestRead:
    def test_gives_a_copy_in_the_dtype_asked_for(self, tmp_path: Path) -> None:
        stored = torch.randn(3, 5)
        save_file({"x": stored}, tmp_path / "model.safetensors")
        source = SafetensorsSource(tmp_path)

        read = source.read("x", torch.bfloat16)
        source.read("x", torch.float32).zero_()

        assert torch.equal(read, stored.to(torch.bfloat16))
        assert torch.equal(load_file(tmp_path / "model.safetensors")["x"], stored)
        assert torch.equal(source.read("x", torch.float32), stored)

    def test_refuses_integers_by_name(self, tmp_path: Path) -> None:
        save_file({"x": torch.ones(3, dtype=torch.int8)}, tmp_path / "model.safetensors")

        with pytest.raises(CheckpointError, match="x is stored as I8; supported are BF16"):
            SafetensorsSource(tmp_path).read("x", torch.float32)
