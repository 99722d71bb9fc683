"""Which of several plugins serves a type, and how a user chooses another."""

import importlib
import types
import warnings

import pytest

from nnterp import families
from nnterp.plugins import catalogue

FAMILY = "RENAME = {}\nENVOYS = {}\n"
WRAPPER = """
    from nnterp.plugins import hookimpl

    @hookimpl
    def nnterp_wrappers():
        return {{"{type}": "plugin_{name}.overlay"}}
"""


def test_a_shipped_family_goes_before_anybody_elses(install):
    install("acme", {"llama.py": FAMILY})
    with pytest.warns(
        UserWarning, match=r"nnterp_families_dense\.llama.* is used.*plugin_acme\.llama of acme-nnterp 1\.0"
    ) as said:
        assert families.lookup("llama").__name__ == "nnterp_families_dense.llama"
    for way in ("NNTERP_DISABLE_PLUGINS=dense", "family=", "nnterp.families.register"):
        assert way in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert families.llama.__name__ == families.lookup("llama").__name__ == "nnterp_families_dense.llama"


def test_what_is_registered_goes_before_every_plugin(install):
    install("acme", {"acme.py": FAMILY})
    mine = families.register(types.SimpleNamespace(RENAME={}, ENVOYS={}), "acme", "llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert families.lookup("acme") is mine
        assert families.lookup("llama") is mine
    del families.REGISTRY["acme"], families.REGISTRY["llama"]
    assert families.lookup("acme").__name__ == "plugin_acme.acme"
    assert families.lookup("llama").__name__ == "nnterp_families_dense.llama"


def test_a_third_party_family_is_used_when_the_shipped_plugin_is_left_out(install, monkeypatch):
    install("acme", {"llama.py": FAMILY})
    monkeypatch.setenv("NNTERP_DISABLE_PLUGINS", "dense")
    assert families.lookup("llama").__name__ == "plugin_acme.llama"


def test_two_third_party_families_are_an_error_at_that_look_up(install, monkeypatch):
    install("acme", {"toy.py": FAMILY, "acme.py": FAMILY})
    install("blunt", {"toy.py": FAMILY})
    both = (
        r"plugin_acme\.toy of acme-nnterp 1\.0 and plugin_blunt\.toy of blunt-nnterp 1\.0 both serve model_type 'toy'"
    )
    assert families.lookup("acme").__name__ == "plugin_acme.acme"
    for look_up in (families.lookup, lambda name: getattr(families, name)):
        with pytest.raises(ValueError, match=both):
            look_up("toy")
    with pytest.raises(ValueError, match=both):
        importlib.import_module("nnterp.families.toy")
    mine = families.register(types.SimpleNamespace(), "toy")
    assert families.lookup("toy") is mine
    del families.REGISTRY["toy"]
    monkeypatch.setenv("NNTERP_DISABLE_PLUGINS", "blunt")
    catalogue.cache_clear()
    assert families.lookup("toy").__name__ == "plugin_acme.toy"


def test_wrappers_follow_the_same_order(install):
    for name in ("acme", "blunt"):
        install(name, {"__init__.py": WRAPPER.format(type="toy-vl", name=name), "overlay.py": FAMILY})
    with pytest.raises(ValueError, match="both serve wrapper 'toy-vl'"):
        families.wrapper("toy-vl")


def test_two_distributions_may_name_their_entry_point_alike(install, tmp_path):
    install("acme", {"acme.py": FAMILY})
    site = install("blunt", {"blunt.py": FAMILY})
    (next(site.glob("*.dist-info")) / "entry_points.txt").write_text("[nnterp.families]\nacme = plugin_blunt\n")
    assert {"acme", "blunt"} <= set(families.known())
