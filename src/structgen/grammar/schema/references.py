"""Where references lead: identifiers, anchors and pointers inside one document.

Holds  nothing outside of the document is ever looked for.
Used   by `bundling`.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from structgen.grammar.schema.keywords import Draft, Json, inner
from structgen.grammar.schema.reading import refusal


class References:
    """The schemas of a document that can be referred to, and what each refers from."""

    def __init__(self, root: Json, draft: Draft) -> None:
        self._draft = draft
        self._resources: dict[str, Json] = {"": root}
        self._anchors: dict[tuple[str, str], Json] = {}
        # By anchor; of `$recursiveAnchor` under the empty one.
        self._dynamic: dict[str, list[Json]] = {}
        # By the identity of the parsed dict, which the document keeps alive.
        self._bases: dict[int, str] = {}
        todo: list[tuple[Json, str]] = [(root, "")]
        while todo:
            schema, base = todo.pop()
            if not isinstance(schema, dict) or id(schema) in self._bases:
                continue
            base = self._entered(schema, base)
            todo += ((each, base) for _, each in inner(schema))

    def base(self, schema: Json) -> str:
        """What references inside a schema are relative to."""
        return self._bases.get(id(schema), "")

    def target(self, reference: str, schema: Json, path: str) -> Json:
        """The schema that a reference inside `schema` leads to; `path` is its own place.

        Raises `ConstraintError` if there is none in the document.
        """
        base = self.base(schema)
        address, fragment = urldefrag(_joined(base, reference))
        fragment = unquote(fragment)
        if address not in self._resources:
            raise refusal(
                path, f"{reference!r:.200} is elsewhere, and nothing is fetched; put it into $defs"
            )
        resource = self._resources[address]
        if not fragment:
            return resource
        if fragment.startswith("/"):
            return self._pointed(resource, address, fragment, path)
        if (address, fragment) not in self._anchors:
            raise refusal(path, f"{reference!r:.200} leads nowhere; there is no such anchor")
        return self._anchors[address, fragment]

    def targets(self, reference: str, schema: Json, path: str) -> list[Json]:
        """All schemas that a dynamic reference may lead to, whatever the way to it.

        Raises `ConstraintError` if it leads nowhere without such a way.
        """
        _, fragment = urldefrag(reference)
        return [self.target(reference, schema, path), *self._dynamic.get(unquote(fragment), ())]

    def _entered(self, schema: dict[str, Any], base: str) -> str:
        """Note a schema under its names; returns what is the base inside of it."""
        draft = self._draft
        name = schema.get("id" if draft is Draft.DRAFT_4 else "$id")
        if isinstance(name, str) and ("$ref" not in schema or draft > Draft.DRAFT_7):
            address, fragment = urldefrag(_joined(base, name))
            if fragment:
                self._anchors[address, fragment] = schema
            else:
                base = address
                self._resources.setdefault(base, schema)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := schema.get(keyword), str) and draft >= Draft.DRAFT_2019_09:
                self._anchors[base, anchor] = schema
        if isinstance(anchor := schema.get("$dynamicAnchor"), str):
            self._dynamic.setdefault(anchor, []).append(schema)
        if schema.get("$recursiveAnchor") is True:
            self._dynamic.setdefault("", []).append(schema)
        self._bases[id(schema)] = base
        return base

    def _pointed(self, resource: Json, base: str, fragment: str, path: str) -> Json:
        found = resource
        for written in fragment[1:].split("/"):
            step = written.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and step in found:
                found = found[step]
            elif isinstance(found, list) and step.isdigit() and int(step) < len(found):
                found = found[int(step)]
            else:
                raise refusal(path, f"'#{fragment}' leads nowhere: there is no {step!r:.80}")
            if isinstance(found, dict):
                base = self._bases.setdefault(id(found), base)
        if not isinstance(found, dict | bool):
            raise refusal(path, f"'#{fragment}' leads to {found!r:.80}, which is no schema")
        return found


def _joined(base: str, reference: str) -> str:
    # `urljoin` knows no schemes such as urn.
    return base + reference if reference.startswith("#") else urljoin(base, reference)
