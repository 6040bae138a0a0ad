"""Tips, explained side by side: a prompt that forks into branches and joins again.

    structgen demo
    structgen run tips.py --arg count=3

The branches share everything that was said before the fork. The engine computes it once, and the
table of calls shows it: `of them cached`.
"""

from __future__ import annotations

from structgen import State, program

TIPS = ("Eat a balanced diet", "Exercise regularly", "Sleep enough", "Spend time with friends")


@program
async def tips(s: State, count: int = len(TIPS)) -> str:
    """Open the answer, list tips, explain each in a branch of its own, sum them all up."""
    chosen = TIPS[:count]
    s.user("Why should I look after my health?")
    with s.assistant():
        await s.gen("opening", max_tokens=40, stop=".", temperature=0)
        s += f".\nHere is what you can do:\n{_numbered(chosen)}"

    async def explain(branch: State, index: int) -> str:
        branch.user(f"Why is it important to {chosen[index].lower()}? Answer in one sentence.")
        with branch.assistant():
            return await branch.gen("reason", max_tokens=40, stop="\n", temperature=0)

    async with s.fork(len(chosen)) as branches:
        reasons = await branches.map(explain)

    s.user("Why is each of them important?")
    s.assistant(_numbered(reasons))
    s.user("Sum it up in one sentence.")
    with s.assistant():
        s += "To stay healthy,"
        return await s.gen("summary", max_tokens=40, stop="\n", temperature=0)


def _numbered(lines: list[str] | tuple[str, ...]) -> str:
    return "\n".join(f"{number}. {line.strip()}" for number, line in enumerate(lines, start=1))
