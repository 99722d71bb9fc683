"""A family is one object however it is spelled, and what is not there says how to get it."""

import importlib
import sys

import pytest

from nnterp import families

FAMILY = "RENAME = {}\nENVOYS = {}\n"


def test_three_spellings_give_one_object():
    import nnterp.families.llama as imported
    from nnterp.families import llama

    own = importlib.import_module("nnterp_families_dense.llama")
    assert own is imported is llama is families.llama is families.lookup("llama")
    assert sys.modules["nnterp.families.llama"] is sys.modules["nnterp_families_dense.llama"] is own
    assert importlib.import_module("nnterp.families.llama") is own


def test_the_look_up_alone_puts_the_family_in_sys_modules(install):
    install("acme", {"acme.py": FAMILY})
    family = families.lookup("acme")
    assert sys.modules["nnterp.families.acme"] is family is sys.modules["plugin_acme.acme"]
    assert vars(families)["acme"] is family


def test_a_family_keeps_its_own_identity():
    assert families.llama.__name__ == families.llama.__spec__.name == "nnterp_families_dense.llama"
    assert families.llama.__spec__.origin == families.llama.__file__


def test_an_engines_families_are_spelled_the_same_way(install):
    hook = """
        from nnterp.plugins import hookimpl

        @hookimpl
        def nnterp_families(engine):
            return {"acme": "plugin_acme.acme"} if engine == "vllm" else {}
    """
    install("acme", {"__init__.py": hook, "acme.py": FAMILY})
    import nnterp.families.vllm.acme as imported
    from nnterp.families.vllm import acme

    assert acme is imported is families.vllm.acme is families.lookup("acme", engine="vllm")
    assert sys.modules["nnterp.families.vllm.acme"] is acme
    assert "acme" in dir(families.vllm)
    assert not hasattr(families, "acme")


def test_dir_lists_what_is_installed(install):
    install("acme", {"acme.py": FAMILY})
    assert {"acme", "gpt2", "llama", "default", "lookup", "register"} <= set(dir(families))
    assert "plugin_acme.acme" not in sys.modules


def test_a_name_that_is_no_family():
    with pytest.raises(AttributeError, match="no attribute 'no_such_type'"):
        _ = families.no_such_type
    with pytest.raises(ModuleNotFoundError, match="No module named 'nnterp.families.no_such_type'"):
        import nnterp.families.no_such_type  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'no_such_type'"):
        from nnterp.families import no_such_type  # noqa: F401
    assert importlib.util.find_spec("nnterp.families.no_such_type") is None


@pytest.mark.parametrize(
    ("model_type", "command"),
    [
        ("mixtral", "nnterp-families-moe serves it: pip install 'nnterp[moe]'"),
        ("mamba2", "nnterp-families-recurrent serves it: pip install 'nnterp[recurrent]'"),
        ("openai-gpt", "nnterp-families-dense serves it: pip install nnterp"),
    ],
)
def test_a_type_that_another_package_serves_says_which(only, model_type, command):
    only()
    name = model_type.replace("-", "_")
    command = command.replace("[", r"\[").replace("]", r"\]")
    with pytest.warns(UserWarning, match=f"no family for model_type {model_type!r}.*{command}"):
        assert families.lookup(model_type) is families.default
    with pytest.raises(AttributeError, match=command):
        getattr(families, name)
    with pytest.raises(ImportError, match=command):
        importlib.import_module(f"nnterp.families.{name}")
    with pytest.raises(ImportError, match=command):
        exec(f"from nnterp.families import {name}")


def test_another_engine_has_no_default(only):
    with pytest.raises(families.UnsupportedFamily, match=r"no family for model_type 'nothing' on vllm$"):
        families.lookup("nothing", engine="vllm")
    only("nnterp-families-dense")
    with pytest.raises(families.UnsupportedFamily, match=r"'llama' on vllm.*pip install 'nnterp\[vllm\]'"):
        families.lookup("llama", engine="vllm")
    with pytest.raises(ImportError, match=r"pip install 'nnterp\[vllm\]'"):
        from nnterp.families.vllm import llama  # noqa: F401


def test_a_package_that_is_installed_and_disabled_says_so(monkeypatch):
    monkeypatch.setenv("NNTERP_DISABLE_PLUGINS", "dense")
    with pytest.warns(
        UserWarning, match=r"nnterp-families-dense 2\.0\.0 serves it, and is disabled.*NNTERP_DISABLE_PLUGINS"
    ):
        families.lookup("llama")


def test_a_type_that_nothing_serves_has_no_hint():
    with pytest.warns(UserWarning, match=r"no family for model_type 'nothing'.*model\.support\(\)") as said:
        assert families.lookup("nothing") is families.default
    assert "pip install" not in str(said[0].message)


def test_the_table_of_what_is_shipped_agrees_with_what_is_shipped():
    from nnterp.shipped import package_for

    for plugin in families.plugins():
        if plugin.shipped:
            assert {package_for(name) for name in plugin.families[None]} <= {plugin.distribution}
