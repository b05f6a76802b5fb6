"""A specification as the text of its file."""

import json
from typing import Any

import msgspec

from workloads.spec import Workload


def to_toml(workload: Workload, comment: str) -> str:
    """Answer *workload* as the text of a specification, *comment* first."""
    top = _table(workload)
    classes, arrivals = top.pop("classes"), top.pop("arrivals")
    lines = [f"# {comment}", *(f"{key} = {_toml(value)}" for key, value in top.items())]
    tables = [("[arrivals]", arrivals), *(("[[classes]]", each) for each in classes)]
    for title, table in tables:
        lines += ["", title, *(f"{key} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _table(value: Any) -> Any:
    """Answer *value* of structs as tables, without what is as if not given."""
    if isinstance(value, list):
        return [_table(each) for each in value]
    if not isinstance(value, msgspec.Struct):
        return value
    tag = value.__struct_config__.tag
    return ({} if tag is None else {"kind": tag}) | {
        field.name: _table(getattr(value, field.name))
        for field in msgspec.structs.fields(value)
        if getattr(value, field.name) not in (field.default, [])
    }


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(each) for each in value) + "]"
    if isinstance(value, float) and value == int(value):
        return str(int(value))
    return json.dumps(value)
