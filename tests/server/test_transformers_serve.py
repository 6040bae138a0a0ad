"""Our server beside `transformers serve`, on the same weights: what both answer to a chat.

Another team's code from the socket to the arithmetic, so a fault that ours has everywhere shows.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import ClientSession, ClientTimeout
from transformers import LlamaConfig, LlamaForCausalLM

from structgen.models.checkpoint import open_checkpoint
from structgen.models.gguf.header import GgufFile
from structgen.models.gguf.vocabulary import vocabulary_from
from tests.server.served import serving

# To start the other server takes about half a minute.
pytestmark = [pytest.mark.soak, pytest.mark.slow]

NEEDED = ("accelerate", "fastapi", "uvicorn", "openai")
QUESTIONS = {"What is 2+2?": 12, "What is 1+1?": 11}  # and the tokens of the answers
START = 240.0


@pytest.fixture(scope="module")
def copy(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model as transformers saves one, in float32."""
    folder = tmp_path_factory.mktemp("copy")
    checkpoint = open_checkpoint(default_model)
    model: Any = LlamaForCausalLM(LlamaConfig(**checkpoint.config))
    source = checkpoint.source
    weights = {name: source.read(name, torch.float32) for name in source.names()}
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    ends = {"eos_token_id": sorted(checkpoint.defaults.end_ids), "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    vocabulary = vocabulary_from(GgufFile(default_model))
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary.definition))
    settings = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert vocabulary.chat_template is not None
    (folder / "chat_template.jinja").write_text(vocabulary.chat_template)
    return folder


@contextmanager
def transformers_serve(model: Path, log: Path) -> Iterator[str]:
    """Its server in a process of its own; gives its address once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = str(Path(sys.executable).with_name("transformers"))
    command = [program, "serve", str(model), "--port", str(port)]
    with log.open("wb") as written:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32"],
            stdout=written,
            stderr=subprocess.STDOUT,
        )
        try:
            end = time.monotonic() + START
            while not _listens(port):
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < end, log.read_text()[-3000:]
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()  # it is asked for nothing any more, and takes long to end by itself
            process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def answer(url: str, model: str, question: str) -> tuple[str, dict[str, int]]:
    """The greedy answer to a question, and its usage."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 40,
    }
    async with (
        ClientSession(url, timeout=ClientTimeout(total=60)) as session,
        session.post("/v1/chat/completions", json=body) as response,
    ):
        found = await response.json()
        assert response.status == 200, found
    assert found["choices"][0]["finish_reason"] == "stop"
    usage = {name: count for name, count in found["usage"].items() if isinstance(count, int)}
    return found["choices"][0]["message"]["content"], usage


@pytest.mark.timeout(600)
async def test_both_servers_give_the_same_answers(
    default_model: Path, copy: Path, tmp_path: Path
) -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"transformers serve needs {', '.join(missing)}; install .[peers]")
    with transformers_serve(copy, tmp_path / "serve.log") as url:
        theirs = [await answer(url, str(copy), question) for question in QUESTIONS]
    async with serving(default_model, slots=1000) as served:
        name = served.service.names[0]
        ours = [await answer(served.url, name, question) for question in QUESTIONS]

    assert [text for text, _ in ours] == [text for text, _ in theirs]
    for (_, counted), (_, other), new in zip(ours, theirs, QUESTIONS.values(), strict=True):
        assert counted["prompt_tokens"] == other["prompt_tokens"] == 37
        assert counted["completion_tokens"] == new
        assert other["completion_tokens"] == new
