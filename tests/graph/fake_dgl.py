"""What DGL documents of its graphs and blocks, in a few lines: to try conversions where it cannot be imported.

Reads   nothing.
Writes  nothing.
Never   more than <https://docs.dgl.ai> says: `ntypes`, `canonical_etypes`, `num_nodes`, `edges`, `nodes[…].data`,
        `create_block`, `srcnodes[…].data`, `dstnodes[…].data`, `NID`, `EID`.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import torch

ONE = ("_N", "_E", "_N")


class View:
    """`graph.nodes["user"].data`."""

    def __init__(self, kinds: Any) -> None:
        self._frames = {kind: types.SimpleNamespace(data={}) for kind in kinds}

    def __getitem__(self, kind: Any) -> Any:
        return self._frames[kind]


class EdgeView(View):
    """Also called: `graph.edges(form="uv", order="eid", etype=…)`."""

    def __init__(self, listed: dict[Any, Any]) -> None:
        super().__init__(listed)
        self._listed = listed

    def __call__(self, form: str = "uv", order: str = "eid", etype: Any = None) -> Any:
        assert (form, order) == ("uv", "eid")
        return self._listed[etype or next(iter(self._listed))]


class Graph:
    def __init__(self, listed: dict[Any, Any], counts: dict[str, int]) -> None:
        self.ntypes = sorted(counts)
        self.canonical_etypes = sorted(listed)
        self._counts = counts
        self.nodes = View(counts)
        self.edges = EdgeView(listed)

    def num_nodes(self, kind: str | None = None) -> int:
        return self._counts[kind or self.ntypes[0]]


class Block:
    def __init__(self, data: dict[Any, Any], num_src_nodes: dict[str, int], num_dst_nodes: dict[str, int]) -> None:
        for kind, (sources, targets) in data.items():
            assert not len(sources) or int(sources.max()) < num_src_nodes[kind[0]]
            assert not len(targets) or int(targets.max()) < num_dst_nodes[kind[2]]
        self._sources, self._targets = num_src_nodes, num_dst_nodes
        self.srcnodes, self.dstnodes = View(num_src_nodes), View(num_dst_nodes)
        self.edges = EdgeView(data)

    def num_src_nodes(self, kind: str) -> int:
        return self._sources[kind]

    def num_dst_nodes(self, kind: str) -> int:
        return self._targets[kind]


def heterograph(data: dict[Any, Any], num_nodes_dict: dict[str, int]) -> Graph:
    return Graph({kind: tuple(torch.as_tensor(end) for end in ends) for kind, ends in data.items()}, num_nodes_dict)


def graph(ends: Any, num_nodes: int) -> Graph:
    return heterograph({ONE: ends}, {"_N": num_nodes})


def as_documented() -> Any:
    """A module that stands in for `dgl`."""
    module = types.ModuleType("dgl")
    module.__dict__.update(NID="_ID", EID="_ID", create_block=Block, heterograph=heterograph, graph=graph)
    return module


def real() -> Any:
    """DGL itself, or None where it does not import; an older one asks setuptools for what is a package by now."""
    before = set(sys.modules)
    try:
        import packaging
        import packaging.version

        extern: Any = types.ModuleType("setuptools.extern")
        extern.packaging = packaging
        sys.modules.setdefault("setuptools.extern", extern)
        sys.modules.setdefault("setuptools.extern.packaging", packaging)
        return importlib.import_module("dgl")
    except Exception:  # it is not installed, or does not fit this torch: that is why there is a stand-in
        for name in sys.modules.keys() - before:
            if name.startswith(("dgl", "setuptools.extern")):
                del sys.modules[name]
        return None
