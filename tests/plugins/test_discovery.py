"""What a plugin brings, and when it is read."""

import sys
import warnings

import pytest

from nnterp import families, plugins

FAMILY = "RENAME = {}\nENVOYS = {}\n"


def plugin(distribution: str) -> plugins.Plugin:
    return next(each for each in families.plugins() if each.distribution == distribution)


def test_every_public_module_of_a_bare_package_is_a_family(install):
    install("acme", {"acme.py": FAMILY, "acme_2.py": FAMILY, "_modeling.py": FAMILY, "more/__init__.py": ""})
    assert {"acme", "acme_2"} <= set(families.known())
    assert not {"_modeling", "more"} & set(families.known())
    assert plugin("acme-nnterp").families[None] == {"acme": "plugin_acme.acme", "acme_2": "plugin_acme.acme_2"}


def test_a_family_is_imported_at_its_own_look_up(install):
    install("acme", {"acme.py": FAMILY, "acme_2.py": "raise RuntimeError('not asked for')"})
    families.known()
    assert "plugin_acme" in sys.modules
    assert "plugin_acme.acme" not in sys.modules
    assert families.lookup("acme") is sys.modules["plugin_acme.acme"]
    assert "plugin_acme.acme_2" not in sys.modules


def test_the_package_is_imported_at_the_first_look_up(install):
    install("acme", {"acme.py": FAMILY})
    assert "plugin_acme" not in sys.modules
    families.lookup("llama")
    assert "plugin_acme" in sys.modules


def test_plugins_are_discovered_once(install):
    install(
        "acme", {"__init__.py": "import sys; sys.discovered = getattr(sys, 'discovered', 0) + 1", "acme.py": FAMILY}
    )
    for _ in range(2):
        families.lookup("acme")
        families.known()
        families.plugins()
    assert sys.discovered == 1
    del sys.discovered


def test_dashes_and_dots_of_a_type_are_underscores_in_the_name(install):
    install("acme", {"acme_tiny_2_5.py": FAMILY})
    assert families.lookup("acme-tiny-2.5") is families.acme_tiny_2_5
    assert "acme_tiny_2_5" in families.known()


def test_a_hook_says_where_the_families_are(install):
    hook = """
        from nnterp.plugins import hookimpl

        @hookimpl
        def nnterp_families(engine):
            return {"acme-1": "plugin_acme.models.first"} if engine is None else {}
    """
    install(
        "acme", {"__init__.py": hook, "not_a_family.py": FAMILY, "models/__init__.py": "", "models/first.py": FAMILY}
    )
    assert families.lookup("acme-1") is sys.modules["plugin_acme.models.first"]
    assert families.acme_1 is sys.modules["plugin_acme.models.first"]
    assert "not_a_family" not in families.known()


def test_a_hook_serves_an_engine(install):
    hook = """
        from nnterp.plugins import hookimpl, public_modules

        @hookimpl
        def nnterp_families(engine):
            if engine == "vllm":
                return public_modules("plugin_acme.engine")
            if engine == "slow":
                return {"acme": "plugin_acme.slow"}
            return {}
    """
    files = {"__init__.py": hook, "engine/__init__.py": "", "engine/acme.py": FAMILY, "slow.py": FAMILY}
    install("acme", files)
    assert families.lookup("acme", engine="vllm").__name__ == "plugin_acme.engine.acme"
    assert families.lookup("acme", engine="slow").__name__ == "plugin_acme.slow"
    assert families.known("slow") == ["acme"]
    assert "acme" not in families.known()
    assert {"slow", "vllm"} <= set(dir(families))


def test_an_engine_that_a_plugin_knows_nothing_of_may_be_answered_with_none(install):
    hook = """
        from nnterp.plugins import hookimpl

        @hookimpl
        def nnterp_families(engine):
            if engine is None:
                return {"acme": "plugin_acme.acme"}
    """
    install("acme", {"__init__.py": hook, "acme.py": FAMILY})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert families.known("nowhere") == []
        assert "acme" in families.known()


def test_a_hook_overlays_a_wrapper(install):
    hook = """
        from nnterp.plugins import hookimpl

        @hookimpl
        def nnterp_wrappers():
            return {"acme-vl": "plugin_acme.overlay"}
    """
    install("acme", {"__init__.py": hook, "overlay.py": FAMILY})
    assert families.wrapper("acme-vl") is sys.modules["plugin_acme.overlay"]
    assert families.wrapper("nothing") is None
    assert "overlay" not in families.known()


def test_plugins_lists_what_is_installed(install):
    install("acme", {"acme.py": FAMILY}, version="3.1")
    listed = plugin("acme-nnterp")
    assert (listed.name, listed.version, listed.state, listed.error) == ("acme", "3.1", "loaded", None)
    assert listed.families == {None: {"acme": "plugin_acme.acme"}, "vllm": {}}
    assert not listed.shipped
    assert [each.distribution for each in families.plugins() if each.shipped] == [
        "nnterp-families-dense",
        "nnterp-families-moe",
        "nnterp-families-recurrent",
        "nnterp-vision",
        "nnterp-vllm",
    ]
    assert {each.state for each in families.plugins()} == {"loaded"}


def test_named_plugins_are_left_out(install, monkeypatch):
    install("acme", {"acme.py": FAMILY})
    install("blunt", {"blunt.py": FAMILY})
    install("other", {"other.py": FAMILY})
    monkeypatch.setenv("NNTERP_DISABLE_PLUGINS", "acme, blunt")
    assert not {"acme", "blunt"} & set(families.known())
    assert "other" in families.known()
    assert plugin("acme-nnterp").state == "disabled"
    assert plugin("acme-nnterp").families == {}
    assert "plugin_acme" not in sys.modules


@pytest.mark.parametrize("requirement", ["nnterp-core<2", "nnterp_core>=3; python_version >= '3.10'"])
def test_a_plugin_built_for_another_core_is_loaded_with_a_warning(install, requirement):
    install("acme", {"acme.py": FAMILY}, requires=[requirement, "torch"])
    with pytest.warns(
        UserWarning, match=r"acme-nnterp 1\.0 was built for nnterp-core.*nnterp-core 2\.0\.0 is installed"
    ):
        assert families.lookup("acme").RENAME == {}


@pytest.mark.parametrize("requirement", ["nnterp-core>=2.0,<3", "nnterp-core<2; extra == 'old'", "nnterp<2"])
def test_a_plugin_built_for_this_core_is_loaded_in_silence(install, requirement):
    install("acme", {"acme.py": FAMILY}, requires=[requirement])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        families.lookup("acme")
