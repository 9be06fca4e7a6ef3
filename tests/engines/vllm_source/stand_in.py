"""Build stand-ins of vLLM's classes from its source: the methods' own signatures, no bodies.

A release that has no build for this machine cannot run. Its stand-in shows that the plugin finds
the methods that it wraps, and that they can be called in each way their signature allows.
"""

import ast
import sys
import types


def install(tree, hooks, monkeypatch):
    """Put stand-ins of the hooked classes and of `get_rope` where vLLM's would be imported.

    Args:
        tree: The source.
        hooks: The plugin's hooks.
        monkeypatch: Takes the stand-ins out again.

    Returns:
        The stand-in classes, by name. Their methods return what `results` of the class has under
        the method's name, and note their arguments in `calls`.
    """
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    classes = {}
    for hook in hooks:
        if hook.owner not in classes:
            names = {"calls": [], "results": {}}
            classes[hook.owner] = type(hook.owner, (), names)
        module = _module(hook.module, monkeypatch)
        setattr(module, hook.owner, classes[hook.owner])
        definition = tree.find(hook.module, hook.owner, hook.name)
        setattr(classes[hook.owner], hook.name, _without_body(definition))
    rotary = _module("vllm.model_executor.layers.rotary_embedding", monkeypatch)
    definition = tree.find("vllm.model_executor.layers.rotary_embedding", "get_rope")
    rotary.get_rope = _without_body(definition)
    return classes


def _module(name, monkeypatch):
    """Return a module of a name, which its parents have, too."""
    if name in sys.modules:
        return sys.modules[name]
    module = types.ModuleType(name)
    module.__path__ = []
    monkeypatch.setitem(sys.modules, name, module)
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(_module(parent, monkeypatch), last, module)
    return module


def _without_body(definition):
    """Compile a function with the signature of a definition, which notes how it is called."""
    arguments = definition.args
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        each.annotation = None
    name = definition.name
    lines = ["return locals()"]
    if [each.arg for each in arguments.args][:1] == ["self"]:
        lines = [
            f"type(self).calls.append(({name!r}, locals()))",
            f"return type(self).results.get({name!r})",
        ]
    source = "\n    ".join([f"def {name}({ast.unparse(arguments)}):", *lines])
    names = {}
    exec(compile(source, "a stand-in", "exec"), names)
    return names[name]
