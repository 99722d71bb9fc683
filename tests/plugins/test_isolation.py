"""A broken plugin is skipped with one warning, and every other one works."""

import warnings

import pytest

from nnterp import families

FAMILY = "RENAME = {}\nENVOYS = {}\n"
HOOK = """
from nnterp.plugins import hookimpl

@hookimpl
def {signature}:
    {body}
"""


def hook(body: str, signature: str = "nnterp_families(engine)") -> dict[str, str]:
    return {"__init__.py": HOOK.format(signature=signature, body=body), "acme.py": FAMILY}


BROKEN = {
    "fails to import": ({"__init__.py": "import not_installed_anywhere"}, "No module named 'not_installed_anywhere'"),
    "does not parse": ({"__init__.py": "def"}, "SyntaxError"),
    "leaves at import": ({"__init__.py": "import sys; sys.exit('no licence')"}, "SystemExit: no licence"),
    "leaves in a hook": (hook("raise SystemExit(2)"), "SystemExit: 2"),
    "has the name of a function": ({"lookup.py": FAMILY}, "plugin_acme.lookup would be nnterp.families.lookup"),
    "has the name of an import": ({"warnings.py": FAMILY}, "nnterp.families.warnings, which is something else"),
    "has the name of an engine": ({"vllm.py": FAMILY}, "nnterp.families.vllm, which is something else"),
    "returns a name that is taken": (hook("return {'default': 'acme'} if engine is None else {}"), "families.default"),
    "raises at import": ({"__init__.py": "raise RuntimeError('not today')"}, "RuntimeError: not today"),
    "raises in a hook": (hook("raise KeyError('weights')"), "KeyError: 'weights'"),
    "raises for an engine": (hook("return {} if engine is None else 1 / 0"), "ZeroDivisionError"),
    "raises in the wrapper hook": (hook("raise OSError('gone')", "nnterp_wrappers()"), "OSError: gone"),
    "returns a list": (hook("return ['acme']"), r"nnterp_families returned \['acme'\], not a mapping"),
    "returns nothing": (hook("pass"), "nnterp_families returned None, not a mapping"),
    "returns modules": (hook("import os; return {'acme': os}"), "nnterp_families returned .* not a mapping"),
    "returns keys of another kind": (
        hook("return {1: 'plugin_acme.acme'}"),
        "nnterp_families returned .* not a mapping",
    ),
    "returns wrappers of another kind": (
        hook("return 3", "nnterp_wrappers()"),
        "nnterp_wrappers returned 3, not a mapping",
    ),
    "asks for an argument there is not": (hook("return {}", "nnterp_families(model)"), "PluginValidationError"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_is_skipped_with_one_warning(install, kind):
    files, error = BROKEN[kind]
    install("acme", files, version="0.9")
    install("other", {"other.py": FAMILY})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert families.lookup("other").__name__ == "plugin_other.other"
        assert families.lookup("llama").__name__ == "nnterp_families_dense.llama"
        families.known("vllm")
        families.plugins()
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=f"(?s)'acme' of acme-nnterp 0.9.*{error}"):
        warnings.warn(caught[0].message, stacklevel=1)
    assert "acme" not in families.known()
    listed = next(each for each in families.plugins() if each.distribution == "acme-nnterp")
    assert (listed.state, listed.families, listed.wrappers) == ("skipped", {}, {})
    assert listed.error


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ("plugin_nowhere", "No module named 'plugin_nowhere'"),
        ("plugin_acme.acme", "plugin_acme.acme is a module without hooks"),
        ("plugin_acme:nothing", "AttributeError"),
    ],
)
def test_an_entry_point_that_names_no_package_is_skipped(install, entry, error):
    install("acme", {"acme.py": FAMILY}, entry=entry)
    with pytest.warns(UserWarning, match=error):
        families.known()
    assert "acme" not in families.known()


def test_a_hook_that_fails_for_an_engine_asked_later_is_skipped_then(install):
    install("acme", hook("return {'acme': 'plugin_acme.acme'} if engine in (None, 'vllm') else engine.nothing"))
    assert "acme" in families.known()
    with pytest.warns(UserWarning, match="acme-nnterp 1.0.*AttributeError"):
        assert families.known("slow") == []
    assert "acme" not in families.known()


def test_an_error_inside_a_family_is_raised_as_it_is(install):
    install("acme", {"acme.py": "import not_installed_anywhere", "acme_2.py": "raise ValueError('wrong weights')"})
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'not_installed_anywhere'$"):
        families.lookup("acme")
    with pytest.raises(ValueError, match=r"^wrong weights$"):
        families.lookup("acme_2")
    assert families.lookup("llama").__name__ == "nnterp_families_dense.llama"


@pytest.mark.parametrize(
    "line",
    [
        "from transformers.models.not_there import modeling_not_there",
        "from transformers.models.llama import modeling_later",
    ],
)
def test_a_family_whose_modeling_module_transformers_lacks_says_both_versions(install, line):
    import transformers

    install("acme", {"acme.py": line}, version="4.2")
    versions = rf"acme-nnterp 4\.2.*transformers {transformers.__version__} is installed"
    with pytest.raises(families.MissingModeling, match=versions):
        families.lookup("acme")
    with pytest.raises(ImportError, match=versions):
        from nnterp.families import acme  # noqa: F401
    assert "acme" in families.known()
    assert "plugin_acme.acme" not in {family.__name__ for family in families.all_families()}
