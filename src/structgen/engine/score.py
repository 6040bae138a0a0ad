"""Scores: exact log-probabilities of many continuations, each place in them computed once.

Owns   the trie of the continuations' tokens, and how it is cut into paths, one job each.
Holds  an inner node has one row, whose logits tell of all that follows it; a leaf has none, so the
       last token of a continuation is never computed; a path begins at the root, or right below a
       node of an earlier path.
Used   by `engine`.

The jobs are requests like any other. A path finds what it shares with an earlier one in the radix
tree, where that was published when it was planned: so they all run in one step, as far as
`max_running` and the chunk allow, and each node is computed by one of them. Without the radix
tree each computes its path from the prompt on, and the scores are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack

import anyio.to_thread
import msgspec
import numpy as np

from structgen.core.radix import Ids
from structgen.core.sequence import Candidates
from structgen.engine.encode import BLOCKING_CHARACTERS, Encoder
from structgen.engine.loading import Loaded
from structgen.engine.stream import DeltaStream
from structgen.errors import ContextLengthError, OptionError, PromptError
from structgen.request import Score, Scores, Text, TokenLogprob, Usage

SHORT = 16  # characters that take as long to encode as it takes to begin

Read = Callable[[Ids, Candidates], DeltaStream]
Endings = Mapping[str, Sequence[int]]


# ---------------------------------------------------------------- the continuations


def texts_from(continuations: Sequence[str]) -> list[str]:
    """The continuations, checked: raises `OptionError`, and `PromptError` for an empty one."""
    if isinstance(continuations, str) or not isinstance(continuations, Sequence):
        raise OptionError("continuations", "expected a list of strings; write [text] for one")
    if not continuations:
        raise OptionError("continuations", "expected at least one string, got an empty list")
    for text in continuations:
        if not isinstance(text, str):
            raise OptionError("continuations", f"expected strings, got {text!r:.80}")
        if not text:
            raise PromptError("a continuation is empty: it has no token to score; leave it out")
    return list(continuations)


async def endings_of(encoder: Encoder, texts: Sequence[str], *, limit: int) -> Endings:
    """The token ids of each text as a continuation; many or long ones are encoded in a thread.

    Raises `PromptError` for one that has no token, `ContextLengthError` for one that has certainly
    more than `limit`.
    """
    for text in texts:
        if (fewest := encoder.fewest_tokens((Text(text),))) > limit:
            raise ContextLengthError(
                f"the continuation {text!r:.40} has at least {fewest} tokens, more than the "
                f"context of {limit}"
            )
    distinct = list(dict.fromkeys(texts))

    def encode() -> dict[str, list[int]]:
        return {text: encoder.continuation(text).tolist() for text in distinct}

    work = sum(len(text) + SHORT for text in distinct)
    found = await anyio.to_thread.run_sync(encode) if work > BLOCKING_CHARACTERS else encode()
    for text, ids in found.items():
        if not ids:
            raise PromptError(f"the continuation {text!r} has no token; leave it out")
    return found


def check_room(before: int, endings: Endings, *, context: int, slots: int) -> None:
    """Raise `ContextLengthError` if the longest does not fit behind a prompt of `before` tokens."""
    text = max(endings, key=lambda text: len(endings[text]))
    total = before + len(endings[text])
    said = f"{before} prompt tokens and {len(endings[text])} of the continuation {text!r:.40}"
    if total > context:
        raise ContextLengthError(
            f"{said} make {total}, more than the context of {context}; shorten one of them"
        )
    if total - 1 > slots:  # the last token of a continuation is never computed
        raise ContextLengthError(
            f"{said} need {total - 1} slots, but the pool has {slots}; shorten one of them, or "
            "give the engine more slots"
        )


# ---------------------------------------------------------------- the trie


class Node:
    """A place in the continuations that at least one of them goes on from."""

    __slots__ = ("children", "depth", "height", "logprobs")

    def __init__(self, depth: int) -> None:
        self.depth = depth  # tokens from the root to here
        self.height = 0  # most inner nodes on a way down from here, this one not counted
        self.children: dict[int, Node] = {}
        # Of each token that follows here: those of `children`, and last ones. NaN until found.
        self.logprobs: dict[int, float] = {}


class Path(msgspec.Struct, frozen=True):
    """A way down the trie as far as there are inner nodes: one job.

    tokens   from the root to the last node
    nodes    the nodes on it that no earlier path has
    """

    tokens: list[int]
    nodes: list[Node]

    def ids(self, before: Ids) -> Ids:
        """The job's prompt, after the tokens `before`."""
        return np.concatenate([before, np.array(self.tokens, np.int64)])

    def candidates(self, before: int) -> Candidates:
        """What the job has to find after a prompt of `before` tokens."""
        return Candidates(
            before + self.nodes[0].depth,
            tuple(np.array(list(node.logprobs), np.int64) for node in self.nodes),
        )

    def take(self, entries: Sequence[TokenLogprob]) -> None:
        """Keep what the job has found."""
        wanted = [(node, token) for node in self.nodes for token in node.logprobs]
        for (node, token), entry in zip(wanted, entries, strict=True):
            assert entry.token == token, "the entries are those of the candidates, in order"
            assert entry.logprob is not None, "a token stands before each candidate"
            node.logprobs[token] = entry.logprob


class Trie:
    """The continuations' tokens."""

    def __init__(self, continuations: Sequence[Sequence[int]]) -> None:
        self.root = Node(0)
        nodes = [self.root]
        for ids in continuations:
            node = self.root
            for token in ids[:-1]:
                node.logprobs.setdefault(token, math.nan)
                if token not in node.children:
                    nodes.append(Node(node.depth + 1))
                    node.children[token] = nodes[-1]
                node = node.children[token]
            node.logprobs.setdefault(ids[-1], math.nan)
        for node in reversed(nodes):  # children come after their parents
            heights = [child.height for child in node.children.values()]
            node.height = max(heights) + 1 if heights else 0

    def paths(self, *, rooted: bool) -> Iterator[Path]:
        """The paths that cover every inner node once, the longest from each start.

        rooted   whether the root has a row: it has none if no token stands before it
        """
        starts = [(list[int](), self.root)]
        if not rooted:
            starts = [([token], child) for token, child in self.root.children.items()]
        while starts:
            tokens, node = starts.pop()
            nodes = [node]
            while node.children:
                following = max(node.children, key=lambda token: node.children[token].height)
                starts += [
                    ([*tokens, token], child)
                    for token, child in node.children.items()
                    if token != following
                ]
                tokens.append(following)
                node = node.children[following]
                nodes.append(node)
            yield Path(tokens, nodes)

    def logprobs(self, ids: Sequence[int]) -> tuple[float, ...]:
        """What was found for the tokens of one continuation."""
        found: list[float] = []
        node = self.root
        for token in ids:
            found.append(node.logprobs[token])
            node = node.children.get(token, node)  # a last token may have no node
        return tuple(found)


# ---------------------------------------------------------------- the scores


async def score(
    before: Ids, continuations: Sequence[str], encoder: Encoder, loaded: Loaded, read: Read
) -> Scores:
    """Score continuations of the tokens `before`.

    read   the stream of a job that samples nothing

    An empty prompt is the beginning of a text, for which the model's BOS token stands, also where
    its tokenizer does not put it there by itself. If it has none, no token stands before the
    continuations, and the first one of each counts as certain.
    """
    texts = texts_from(continuations)
    start = loaded.checkpoint.tokenizer.start_id
    if not before.size and start is not None:
        before = np.array([start], np.int64)
    endings = await endings_of(encoder, texts, limit=loaded.max_context)
    check_room(before.size, endings, context=loaded.max_context, slots=loaded.slots)
    trie = Trie(list(endings.values()))
    paths = list(trie.paths(rooted=bool(before.size)))
    if not before.size:
        trie.root.logprobs = dict.fromkeys(trie.root.logprobs, 0.0)
    usages = await _run(paths, before, read)
    # The first path is the only one that has the prompt from others than this call.
    cached = usages[0].cached_tokens if before.size else 0
    each = tuple(
        Score(text=text, tokens=tuple(endings[text]), logprobs=trie.logprobs(endings[text]))
        for text in texts
    )
    return Scores(each, Usage(prompt_tokens=before.size, cached_tokens=cached))


async def _run(paths: Sequence[Path], before: Ids, read: Read) -> list[Usage]:
    """Have the paths computed, and take what was found."""
    usages: list[Usage] = []
    async with AsyncExitStack() as stack:
        # All are submitted before one is read, so that they run together.
        streams = [
            await stack.enter_async_context(read(path.ids(before), path.candidates(before.size)))
            for path in paths
        ]
        for path, stream in zip(paths, streams, strict=True):
            async for delta in stream:
                assert delta.finish is not None, "a job that samples nothing has one delta"
                path.take(delta.prompt_logprobs)
                usages.append(delta.finish.usage)
    return usages
