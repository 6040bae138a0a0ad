"""Tips, expanded side by side: a prompt that forks into branches and joins again.

    structgen demo
    structgen run tips.py --arg topic=cooking --temperature 0.7 --seed 1

The branches share everything that was said before the fork. The engine computes it once and the
usage table shows it: `of them cached`.
"""

from __future__ import annotations

from structgen import State, program


@program
async def tips(s: State, topic: str = "staying healthy", count: int = 4) -> str:
    """Ask for short tips, expand each in a branch of its own, then sum all of them up."""
    s.system("You are a helpful assistant. You answer in one or two sentences.")
    s.user(f"Give me {count} short tips for {topic}, as a numbered list.")
    with s.assistant():
        await s.gen("list", max_tokens=80, temperature=0)

    async def expand(branch: State, index: int) -> str:
        branch.user(f"Explain tip {index + 1} in one sentence.")
        with branch.assistant():
            return await branch.gen("detail", max_tokens=40, stop="\n", temperature=0)

    async with s.fork(count) as branches:
        details = await branches.map(expand)

    s.user("Explain each of them.")
    s.assistant("\n".join(f"{index + 1}. {text}" for index, text in enumerate(details)))
    s.user("Now sum all of it up in one sentence.")
    with s.assistant():
        return await s.gen("summary", max_tokens=40, temperature=0)
