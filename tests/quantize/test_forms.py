"""Twins of any form and number."""

import pickle

import pytest
from conftest import quantize
from folders import contents

from apex_engine.checkpoint.expert_file import expert_file_bytes
from apex_engine.checkpoint.manifest import Manifest, verify
from apex_engine.checkpoint.twin import form_name
from apex_engine.errors import ApexError
from apex_engine.kernels.packing import GROUP_SIZES
from apex_engine.quantize.__main__ import parser
from apex_engine.quantize.convert import convert
from apex_engine.quantize.forms import FORMS, GROUPED, low_forms
from apex_engine.quantize.ladder import make_twins
from apex_engine.quantize.layer import LayerWork, write_layer
from apex_engine.quantize.methods.table import METHODS, method
from apex_engine.quantize.options import Options
from apex_engine.quantize.report import count_fallbacks
from apex_engine.quantize.source.model import Source
from models import save_model


@pytest.fixture(scope="module")
def source(tiny):
    return tiny(num_hidden_layers=3)[0]


@pytest.fixture(scope="module")
def finished(tiny):
    return tiny(num_hidden_layers=3)[1]


class Three(Options):
    """Options of three twins, in no order."""

    @property
    def forms(self):
        return "int2-int4", "int2", "int8"


@pytest.mark.parametrize("form", FORMS)
def test_a_form_has_the_name_of_its_formats(form):
    assert form_name(**FORMS[form]) == form


def test_what_low_can_be():
    assert low_forms() == ("int8", "int2", "int2-int3", "int2-int4")


@pytest.mark.parametrize(("low", "group_size"), [("int8", 64), ("int2-int3", 32), ("int2-int4", 64)])
def test_low_of_other_forms(source, tmp_path, low, group_size):
    manifest = quantize(source, tmp_path / "apex", low=low, group_size=group_size)
    assert [twin.name for twin in manifest.twins] == [low, "bfloat16"] and manifest == Manifest.read(tmp_path / "apex")
    assert {matrix: manifest.twins[0].layout.format(matrix).name for matrix in ("up", "down")} == FORMS[low]
    for layer in manifest.layers:
        assert layer.files == tuple(f"experts/layer-00{layer.number}.{name}.safetensors" for name in (low, "bfloat16"))
    assert set(manifest.errors) == {f"{low}.up", f"{low}.down", "bfloat16.up", "bfloat16.down"}


def test_low_down_is_a_short_way_to_say_a_form(source, tmp_path):
    for folder, options in (("1", {"low_down": 3}), ("2", {"low": "int2-int3"})):
        quantize(source, tmp_path / folder, **options)
    one, two = (contents(tmp_path / folder) for folder in ("1", "2"))
    assert {name for name in one if one[name] != two[name]} == {"apex.json"}  # their options


def test_a_new_form_is_one_line(source, finished, tmp_path, monkeypatch):
    monkeypatch.setitem(FORMS, "int3-int4", {"up": "int3", "down": "int4"})
    assert parser().parse_args([str(source), "--low", "int3-int4"]).low == "int3-int4"
    manifest = quantize(source, tmp_path / "apex", low="int3-int4", high="int8")
    verify(tmp_path / "apex", lambda name: None)
    assert [twin.name for twin in manifest.twins] == ["int3-int4", "int8"]
    low, before = manifest.errors, Manifest.read(finished).errors
    assert low["int3-int4.up"]["error"] < 0.6 * before["int2.up"]["error"]
    assert low["int3-int4.down"]["error"] < 0.4 * before["int2.down"]["error"]


def test_three_twins_stand_in_the_order_of_their_bytes(source, tmp_path):
    manifest, _ = convert("three", Source(source), tmp_path / "apex", Three(high="int8"), lambda n: None)
    assert manifest == Manifest.read(tmp_path / "apex")
    verify(tmp_path / "apex", lambda name: None)
    assert [twin.name for twin in manifest.twins] == ["int2", "int2-int4", "int8"]
    assert sorted(manifest.strides.values()) == list(manifest.strides.values())
    assert set(manifest.errors) == {f"{twin.name}.{matrix}" for twin in manifest.twins for matrix in ("up", "down")}
    assert manifest.errors["int2.up"] == manifest.errors["int2-int4.up"]
    assert len({name for layer in manifest.layers for name in layer.files}) == 9
    for layer in manifest.layers:  # every file holds the twin whose place it has
        for name, twin in zip(layer.files, manifest.twins, strict=True):
            assert manifest.files[name].nbytes == expert_file_bytes(twin.layout, manifest.experts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": "int8", "high": "int8"}, "no fewer than .* of HIGH, int8"),
        ({"low": "bfloat16"}, "unknown LOW format bfloat16: choose from int8, int2"),
        ({"low": "16bit"}, "unknown LOW format"),
        ({"low": "int2-int3", "low_down": 3}, "--low-down is for --low int2"),
        ({"low": "int8", "low_method": "hqq"}, "--low int8 has no use for --low-method and --importance"),
        ({"low": "int8", "importance": "x"}, "--low int8 has no use for --low-method and --importance"),
    ],
)
def test_lows_that_are_refused(source, tmp_path, options, message):
    with pytest.raises(ApexError, match=message) as caught:
        quantize(source, tmp_path / "apex", **options)
    assert "\n" not in str(caught.value) and not (tmp_path / "apex").exists()


def test_groups_need_not_fit_where_there_are_none(tmp_path):
    source = Source(save_model(tmp_path / "source", intermediate_size=96))
    twins = make_twins(Options(low="int8"), source)
    assert [twin.name for twin in twins] == ["int8", "bfloat16"]


def test_fallbacks_name_the_twin_where_several_have_groups(source):
    two, three = (make_twins(options, Source(source)) for options in (Options(), Three(high="int8")))
    rows = {"as.int2.up": [[0.0], [2.0]], "as.int2.down": [[1.0], [1.0]]}
    assert count_fallbacks({0: rows}, two) == {"clip instead of gptq": 2, "unweighted": 1}
    rows |= {"as.int2-int4.up": [[2.0], [2.0]], "as.int2-int4.down": [[0.0], [0.0]]}
    assert count_fallbacks({0: rows}, three) == {
        "clip instead of gptq (int2)": 2,
        "unweighted (int2)": 1,
        "unweighted (int2-int4)": 2,
    }


def test_a_layer_is_work_from_files_to_files(source, finished, tmp_path):
    """Sent elsewhere and done there, it gives the files that a whole run writes."""
    manifest = Manifest.read(finished)
    work = LayerWork(source, 1, tmp_path / "apex", manifest.twins)
    done = write_layer(pickle.loads(pickle.dumps(work)))
    assert tuple(done.files) == work.files == manifest.layers[1].files
    for name in work.files:
        assert (tmp_path / "apex" / name).read_bytes() == (finished / name).read_bytes()
        assert done.files[name] == manifest.files[name]
    assert sum(path.is_file() for path in (tmp_path / "apex").rglob("*")) == 2


def test_every_method_of_the_table_is_there():
    for name in METHODS:
        assert callable(method(name))


def test_the_help_names_every_group_size():
    assert f"one of {', '.join(map(str, GROUP_SIZES))}" in " ".join(parser().format_help().split())
    assert set(GROUPED) == {name for form in FORMS.values() for name in form.values() if name in GROUPED}
