"""Faults that loaders of this class were reported for: config fields, tied heads, paths, templates.

On tiny checkpoints whose files are edited, opened by the engine, and on the command as a process
that cannot reach a network without leaving a trace.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from structgen import Engine, State, program
from structgen.cli import main
from structgen.errors import CheckpointError, ModelNotFoundError, TemplateError
from tests.engine.tiny import CHATML, write_tiny_model

PROMPT = "1, 2, 3, 4, 5, 6, 7, 8,"
THETA = 500_000.0
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied checkpoint whose head_dim follows from its other sizes, with a theta of its own."""
    folder = write_tiny_model(tmp_path_factory.mktemp("loading"))
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=258,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def model(written: Path, tmp_path: Path) -> Path:
    """A copy whose files may be changed; the weights are linked."""
    folder = tmp_path / "model"
    shutil.copytree(written, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for weights in written.glob("*.safetensors"):
        (folder / weights.name).symlink_to(weights)
    return folder


def edited(model: Path, edit: Edit) -> Path:
    """Change config.json in place."""
    file = model / "config.json"
    config = json.loads(file.read_text())
    edit(config)
    file.write_text(json.dumps(config))
    return model


def new_engine(model: str | Path, **options: Any) -> Engine:
    return Engine(model, **{"slots": 1000, "threads": 1, "dtype": "float32", **options})


async def ids_of(model: Path) -> tuple[int, ...]:
    async with new_engine(model) as engine:
        return (await engine.generate(PROMPT, max_tokens=24, temperature=0)).tokens


def spell_theta_as_before(config: dict[str, Any]) -> None:
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]


def drop_theta(config: dict[str, Any]) -> None:
    del config["rope_parameters"]


class TestConfigFields:
    async def test_may_be_spelled_as_before_or_left_out_where_they_follow(
        self, model: Path
    ) -> None:
        wanted = await ids_of(model)
        older = await ids_of(edited(model, spell_theta_as_before))
        derived = await ids_of(edited(model, lambda config: config.pop("head_dim")))

        assert older == derived == wanted

    async def test_of_a_missing_theta_are_never_guessed_in_silence(self, model: Path) -> None:
        wanted = await ids_of(model)
        with pytest.warns(UserWarning, match=r"no rope_theta; using 10000\.0"):
            other = await ids_of(edited(model, drop_theta))

        assert other != wanted

    @pytest.mark.parametrize("edit", [lambda _: None, spell_theta_as_before], ids=["new", "old"])
    async def test_can_be_looked_up(self, model: Path, edit: Edit) -> None:
        async with new_engine(edited(model, edit)) as engine:
            assert engine.loaded.runner.decoder.config.rope.theta == THETA

    async def test_that_contradict_the_weights_are_refused_with_both_shapes(
        self, model: Path
    ) -> None:
        edited(model, lambda config: config.pop("num_key_value_heads"))

        both = r"k_proj\.weight has shape \[32, 64\] in the file, but the config implies \[64, 64\]"
        with pytest.raises(CheckpointError, match=both):
            await ids_of(model)


class TestAHeadThatIsNotInTheFile:
    async def test_is_the_embedding_and_the_same_at_each_load(self, model: Path) -> None:
        assert await ids_of(model) == await ids_of(model)

    async def test_is_named_where_nothing_says_that_it_is_tied(self, model: Path) -> None:
        edited(model, lambda config: config.pop("tie_word_embeddings"))

        with pytest.raises(CheckpointError, match=r"lm_head\.weight.*tie_word_embeddings"):
            await ids_of(model)


class TestAPathThatIsNoModel:
    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("/no/such/model", "/no/such/model: no such file or directory"),
            ("smollm3", "smollm3: no such path, and no known model"),
            ("", "the model's name is empty"),
            (Path("smollm2-135m"), "smollm2-135m: no such file or directory"),
        ],
        ids=repr,
    )
    async def test_is_an_error_of_the_block_and_leaves_nothing(
        self, name: str | Path, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        with pytest.raises(ModelNotFoundError, match=message) as caught:
            await new_engine(name).__aenter__()

        assert "\n" not in str(caught.value)
        assert [t for t in threading.enumerate() if t.name.startswith("structgen")] == []
        assert os.listdir(tmp_path) == []

    async def test_is_an_error_also_if_it_is_a_directory(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFoundError, match=f"^{tmp_path}: .* no config.json"):
            await new_engine(tmp_path).__aenter__()

    async def test_is_an_error_also_if_the_weights_are_damaged(self, model: Path) -> None:
        (model / "model.safetensors").unlink()
        (model / "model.safetensors").write_bytes(b"\xff" * 100)

        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            await new_engine(model).__aenter__()


@program
async def talk(s: State) -> int:
    s.user("hi")
    with s.assistant():
        await s.gen("x", max_tokens=1, temperature=0)
    return s.meta("x").usage.prompt_tokens


class TestTheChatTemplate:
    async def test_is_not_needed_for_plain_text(self, model: Path) -> None:
        (model / "chat_template.jinja").unlink()
        async with new_engine(model) as engine:
            done = await engine.generate(PROMPT, max_tokens=3, ignore_eos=True)
            assert done.usage.completion_tokens == 3
            for messages in (
                engine.generate,
                lambda prompt: engine.stream(prompt).__aenter__(),
                lambda prompt: engine.score(prompt, ["a"]),
                engine.prime,
            ):
                with pytest.raises(TemplateError, match=r"no chat template.*chat_template"):
                    await messages([{"role": "user", "content": "hi"}])

    async def test_is_missed_by_programs_that_use_roles(self, model: Path) -> None:
        (model / "chat_template.jinja").unlink()
        async with new_engine(model) as engine:
            with pytest.raises(TemplateError, match=r"no chat template.*chat_template"):
                await talk.run(engine)

            assert engine.statistics().steps == 0

    async def test_can_come_from_a_file(self, model: Path, tmp_path: Path) -> None:
        async with new_engine(model) as engine:
            own = (await talk.run(engine)).value
        (model / "chat_template.jinja").unlink()
        (tmp_path / "mine.jinja").write_text(CHATML)
        async with new_engine(model, chat_template=tmp_path / "mine.jinja") as engine:
            given = (await talk.run(engine)).value

        # Of bytes, and three control tokens: user\nhi, \n, assistant\n.
        assert own == given == 3 + len("user\nhi") + len("\n") + len("assistant\n")

    async def test_with_a_fault_is_refused_at_opening_with_file_and_line(
        self, model: Path, tmp_path: Path
    ) -> None:
        mine = tmp_path / "mine.jinja"
        mine.write_text("{% for m in messages %}\n{{ m.content }}\n{% end %}")

        with pytest.raises(TemplateError, match=f"^{mine}, line 3: "):
            await new_engine(model, chat_template=mine).__aenter__()

    async def test_refuses_in_its_own_words(self, model: Path) -> None:
        (model / "chat_template.jinja").write_text(
            "{% if messages[0].role == 'user' %}"
            "{{ raise_exception('Say who you are.') }}"
            "{% endif %}" + CHATML
        )
        async with new_engine(model) as engine:
            with pytest.raises(TemplateError, match=r"Say who you are\."):
                await talk.run(engine)
            with pytest.raises(TemplateError, match=r"Say who you are\."):
                await engine.generate([{"role": "user", "content": "hi"}])

            assert (await engine.generate(PROMPT, max_tokens=1)).usage.completion_tokens == 1

    async def test_leaves_vocabulary_and_end_tokens_as_they_are(self, model: Path) -> None:
        async with new_engine(model) as engine:
            before = (engine.defaults, engine.loaded.checkpoint.tokenizer.vocab_size)
        edited(model, spell_theta_as_before)
        (model / "chat_template.jinja").unlink()
        async with new_engine(model) as engine:
            after = (engine.defaults, engine.loaded.checkpoint.tokenizer.vocab_size)

        assert before == after
        assert before[0].end_ids == (258,)


# Put first on the path of a process: notes every attempt to look up a host or connect to one.
WATCH = """
import os, socket

def refuse(*arguments, **options):
    with open(os.environ["ATTEMPTS"], "a") as file:
        file.write(f"{arguments[-1]}\\n")
    raise OSError("no network here")

socket.getaddrinfo = socket.create_connection = refuse
socket.socket.connect = refuse
"""
PROGRAM = """
from structgen import State, program

@program
async def talk(s: State) -> str:
    s.user("hi")
    with s.assistant():
        return await s.gen("x", max_tokens=2)
"""


class Done(msgspec.Struct, frozen=True):
    """What a process left behind; `seconds` of CPU time."""

    code: int
    out: str
    err: str
    seconds: float
    attempts: str


class TestTheCommand:
    @pytest.fixture
    def run(self, tmp_path: Path, installed: Path) -> Callable[..., Done]:
        """`structgen run talk.py ...` as a process in a folder of its own."""
        (tmp_path / "watch").mkdir()
        (tmp_path / "watch" / "sitecustomize.py").write_text(WATCH)
        (tmp_path / "talk.py").write_text(PROGRAM)
        attempts = tmp_path / "attempts"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(tmp_path / "watch"), str(installed))),
            "ATTEMPTS": str(attempts),
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("STRUCTGEN_TRACEBACK", None)

        def run(*arguments: str | Path) -> Done:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run(
                [sys.executable, "-m", "structgen", "run", "talk.py", *map(str, arguments)],
                capture_output=True,
                text=True,
                cwd=tmp_path,
                env=environment,
                check=False,
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return Done(
                code=done.returncode,
                out=done.stdout,
                err=done.stderr,
                seconds=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
                attempts=attempts.read_text() if attempts.exists() else "",
            )

        return run

    def check(self, done: Done, *words: str, code: int = 1) -> None:
        """One line on stderr with these words, quickly, and without a network."""
        assert done.err.startswith("structgen: ")
        assert len(done.err.splitlines()) == 1
        assert [word for word in words if word not in done.err] == []
        assert (done.code, done.out, done.attempts) == (code, "", "")
        assert done.seconds < 5

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("/no/such/model", ["/no/such/model", "no such file or directory"]),
            ("smollm3", ["smollm3", "no such path"]),
            ("", ["name is empty"]),
            ("watch", ["watch", "no config.json"]),
            ("./watch", ["watch", "no config.json"]),
            ("talk.py", ["talk.py"]),
        ],
        ids=repr,
    )
    def test_names_what_is_no_model(
        self, run: Callable[..., Done], name: str, words: list[str]
    ) -> None:
        # A name under which there is nothing is a mistake of the command line.
        code = 1 if name == "talk.py" else 2
        self.check(run("--model", name), *words, code=code)

    def test_names_what_the_weights_lack(self, run: Callable[..., Done], model: Path) -> None:
        edited(model, lambda config: config.pop("tie_word_embeddings"))

        self.check(run("--model", model), "lm_head.weight")

    def test_runs_where_all_is_well(self, run: Callable[..., Done], model: Path) -> None:
        """So that the others fail for their own reason, and not for this setting's."""
        done = run("--model", model, "--slots", "500", "--json")

        assert (done.code, done.err, done.attempts) == (0, "", "")
        assert json.loads(done.out)["usage"]["completion_tokens"] <= 2


class TestTheCommandHere:
    """What a template is to blame for: in this process, which has loaded all that it needs."""

    @pytest.fixture
    def run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> Callable[..., tuple[int, str]]:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "talk.py").write_text(PROGRAM)

        def run(*arguments: str | Path) -> tuple[int, str]:
            code = main(["run", "talk.py", *map(str, arguments)])
            written = capsys.readouterr()
            assert written.out == ""
            assert len(written.err.splitlines()) == 1
            return code, written.err

        return run

    def test_names_the_option_where_there_is_no_template(
        self, run: Callable[..., tuple[int, str]], model: Path
    ) -> None:
        (model / "chat_template.jinja").unlink()
        code, said = run("--model", model, "--slots", "500")

        assert code == 1
        assert "no chat template" in said
        assert "chat_template" in said

    def test_names_file_and_line_of_a_faulty_template(
        self, run: Callable[..., tuple[int, str]], model: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "mine.jinja").write_text("\n{% if %}")
        code, said = run("--model", model, "--chat-template", "mine.jinja")

        assert code == 1
        assert "mine.jinja, line 2" in said

    def test_repeats_what_a_template_says(
        self, run: Callable[..., tuple[int, str]], model: Path
    ) -> None:
        (model / "chat_template.jinja").write_text("{{ raise_exception('Not like this.') }}")
        code, said = run("--model", model, "--slots", "500")

        assert code == 1
        assert "Not like this." in said
