"""What a process remembers, by what it is kept, and why that is enough: a cache that is kept by
less than what decides gives the answer of another model, mesh or process group.

`CACHES` is the list; the check finds them in the sources: functions with a decorator that
remembers, and collections of a module that are empty at first.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: By file and name.
CACHES = {
    # of the running process group, or without one: `compat.once_a_world` compares the group itself
    "autoshard/building/all_ranks.py _smallest": "the device's kind; of all ranks of a world",
    "autoshard/mesh_search/first_call.py _chosen": "the device's kind; one mesh serves a process",
    "autoshard/training_log.py _logs": "the file's path; a run writes one",
    "autoshard/weights/link.py _links": "nothing: one list a world, the last of it in use",
    "runtime/collectives/fused.py _measured": "group, device, sizes and dtypes",
    "runtime/agreement/backwards.py _worlds": "the world's exchange",
    "runtime/agreement/compiled_once.py _known": "the world's exchange",
    "runtime/compat/groups.py host_group": "the group's name, unique in a world",
    "runtime/compat/groups.py has_symmetric_memory": "the group's name, unique in a world",
    "runtime/mesh.py _made": "device and sizes: all ranks are in it",
    "runtime/mesh.py _of": "the DeviceMesh: equal ones of one world have equal groups",
    "runtime/mesh.py axes_of": "the DeviceMesh: equal ones of one world have equal groups",
    "runtime/mesh.py home_mesh": "the DeviceMesh and the rank",
    "runtime/optimizer/exchange.py sharers_of": "the DeviceMesh and the rank",
    "runtime/optimizer/owned_steps.py _line": "the DeviceMesh",
    "runtime/pipeline/channel.py _other_group": "the group's name, all groups and a number",
    # of an object, for as long as it lives
    "autoshard/building/all_ranks.py _trained": "the parameter",
    "autoshard/building/fitting.py _remembered": "stored parameter, options, operators",
    "autoshard/capture/guards.py _split_sizes": "code, source and dim: more guards, never less",
    "autoshard/program.py _handles": "a number that is never given again",
    "runtime/compat/compiled_modules.py compiled": "the method of one compiled module",
    "runtime/parameters/optimizers.py _given": "the module",
    "runtime/parameters/optimizers.py _agreed": "the optimizer, and its parameters in their order",
    "runtime/parameters/buffers.py _given": "the module",
    "runtime/parameters/buffers.py _settled": "the module, which is stored once",
    "runtime/compat/tensors.py _specs": "the mesh's id, which lives as long as the spec",
    # of a run, taken away when it ends
    "runtime/collectives/lockstep.py _meetings": "a number that is never given again",
    "runtime/parameters/eager/graph_boundary.py _kept": "cleared when the next graph runs",
    "runtime/randomness/generators.py _of_thread": "the place of a lockstep thread",
    # functions of their arguments, or of the installation
    "autoshard/compiling/any_rank.py _signature": "the function",
    "autoshard/compiling/inner.py _source_digest": "our source files, as they were imported",
    "autoshard/export/rank_graph/core_operators.py _table": "torch's decompositions",
    "autoshard/export/to_tensorrt/build.py log_of": "the module tensorrt",
    "autoshard/planning/estimate/weights.py step_work": "an optimizer's name, shape and dtype",
    "runtime/compat/tensors.py transfers": "torch's operators",
    "runtime/compat/version.py probe_compilers": "torch's names",
    "runtime/errors.py _torch_folder": "where torch is installed",
    "runtime/optimizer/derived.py _class": "the optimizer's class",
    "runtime/optimizer/recording.py is_elementwise": "torch's operators",
    "runtime/operators/expert_body.py parse": "the text of a body",
    "runtime/parameters/access.py stored_class": "class, names and dtype",
    "runtime/parameters/eager/operator_names.py name_of": "the function",
    "runtime/parameters/eager/operator_names.py operator": "the name",
    "runtime/parameters/optimizers.py _watch_steps": "nothing: torch's hook is set once",
    "runtime/parameters/gradients.py _references_of_unshared": "this Python",
    "runtime/parameters/gradients.py _watch_optimizers": "nothing: torch's hook is set once",
    # registers, filled when modules are imported
    "autoshard/export/to_tensorrt/converters/network.py CONVERTERS": "the operator",
    "autoshard/planning/rules/registry.py _rules": "the operator",
    "runtime/compat/dynamo.py ONLY_IN_OURS": "the class",
    "runtime/compat/dynamo.py READ_WHOLE": "the class",
    "runtime/compat/inductor.py DECOMPOSITIONS": "the operator",
    "runtime/compat/inductor_memory.py ON_HOST": "the operator",
    "runtime/randomness/philox.py DRAWING": "the operator's name",
}

_REMEMBER = {"cache", "lru_cache", "once_a_world"}
_COLLECTIONS = {
    *("dict", "list", "set", "defaultdict", "OrderedDict", "Counter", "deque", "WeakKeyDictionary"),
    *("WeakValueDictionary", "WeakSet", "WeakTensorKeyDictionary", "WeakIdKeyDictionary"),
}


def named(node: ast.expr) -> str:
    """`lru_cache` of `functools.lru_cache(maxsize=1)`, `dict` of `dict[int, str]()`."""
    while isinstance(node, (ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def is_empty(value: ast.expr | None) -> bool:
    """Whether a value is a collection with nothing in it."""
    if isinstance(value, ast.Call):
        return named(value) in _COLLECTIONS and not value.args
    return isinstance(value, (ast.Dict, ast.List)) and ast.unparse(value) in ("{}", "[]")


def caches(tree: ast.Module) -> Iterator[str]:
    """The names of what a module remembers: in classes too, which live as long."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and _REMEMBER & set(map(named, node.decorator_list)):
            yield node.name
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for one in node.body:
                if isinstance(one, (ast.Assign, ast.AnnAssign)) and is_empty(one.value):
                    targets = one.targets if isinstance(one, ast.Assign) else [one.target]
                    yield from map(ast.unparse, targets)


def test_every_cache_of_a_process_says_what_it_is_kept_by() -> None:
    found = [
        f"{file.relative_to(ROOT)} {name}"
        for room in ("autoshard", "passes", "runtime")
        for file in sorted((ROOT / room).rglob("*.py"))
        for name in caches(ast.parse(file.read_text()))
    ]
    assert sorted(found) == sorted(CACHES)


def test_a_cache_is_found() -> None:
    text = """
kept: dict[int, str] = {}
seen = weakref.WeakSet()
FIXED = {1: 2}
class Plan:
    known = []
    @functools.lru_cache(maxsize=2)
    def asked(self): local = {}
"""
    assert sorted(caches(ast.parse(text))) == ["asked", "kept", "known", "seen"]
