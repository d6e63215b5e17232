"""Settings of a shard that change what is built, and under which names what it keeps is found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from server.arch import families
from server.arch.spec import with_rope_scaling
from server.config import parse_graph_sizes
from server.loading import load, tiers
from server.pb import generate_pb2 as pb
from tests.server.checkpoints import Checkpoints
from tests.server.test_service import config_of


def spec_of(config: dict[str, object]) -> object:
    return families.find(config)[1]


def test_a_rotation_of_windowed_layers_alone_stays_as_it_is(checkpoints: Checkpoints) -> None:
    folder, _ = checkpoints("gemma3_text")
    _, plain = families.find(json.loads((folder / "config.json").read_text()))
    scaled = with_rope_scaling(plain, "linear", 8.0)
    for before, after in zip(plain.layers, scaled.layers, strict=True):
        assert (before.position == after.position) == bool(before.window)
    assert {True, False} == {bool(layer.window) for layer in plain.layers}


def test_two_rotated_features_cannot_be_scaled_dynamically(checkpoints: Checkpoints) -> None:
    folder, _ = checkpoints("gpt_neox-serial")
    _, plain = families.find(json.loads((folder / "config.json").read_text()))
    with pytest.raises(ValueError, match="needs more than 2 rotated features of a head: use linear"):
        with_rope_scaling(plain, "dynamic", 2.0)


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_scaled_rotations_are_those_that_config_json_could_ask_for(checkpoints: Checkpoints, kind: str) -> None:
    folder, _ = checkpoints("llama")
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling")}
    _, plain = families.find(config)
    _, asked = families.find(config | {"rope_scaling": {"rope_type": kind, "factor": 4.0}})
    scaled = with_rope_scaling(plain, kind, 4.0)
    assert asked.layers == scaled.layers != plain.layers
    assert 4 * plain.max_positions == scaled.max_positions


def test_a_model_without_rotations_refuses_to_have_them_scaled(tiny_bloom: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--rope-scaling and --rope-factor .* does not have: leave them out"):
        load(config_of(tiny_bloom, tmp_path / "s", rope_factor=2.0))


@pytest.mark.parametrize("given", [{"rope_scaling": "dynamic"}, {"rope_factor": 2.0}])
def test_one_half_of_the_scaling_implies_the_other(
    checkpoints: Checkpoints, tmp_path: Path, given: dict[str, object]
) -> None:
    folder, _ = checkpoints("llama")
    plain = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    threads = torch.get_num_threads()
    _, info = load(config_of(folder, tmp_path / "s", **given))
    torch.set_num_threads(threads)
    assert plain * int(given.get("rope_factor", 1)) == info.max_positions  # type: ignore[call-overload]
    assert ("rope_scaling" in given) != info.shares_prefixes  # dynamic: rotations depend on the prompt's length


@pytest.mark.parametrize(("text", "sizes"), [("0", ()), ("1", (1,)), ("8, 2,4,2", (2, 4, 8)), ("1024", (1024,))])
def test_batch_sizes_of_graphs_are_a_list_or_none(text: str, sizes: tuple[int, ...]) -> None:
    assert sizes == parse_graph_sizes(text)


@pytest.mark.parametrize("text", ["", "x", "1,", "-1", "0,4", "1025", "1.5", "99999999999999999999", "²"])
def test_what_is_no_list_of_batch_sizes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give batch sizes from 1 to 1024, separated by commas, or 0 for none"):
        parse_graph_sizes(text)


def test_no_graphs_are_captured_where_none_are_wanted(tiny_bloom: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    engine, _ = load(config_of(tiny_bloom, tmp_path / "s", cuda_graphs="0"))
    torch.set_num_threads(threads)
    assert "--cuda-graphs is 0" == engine.why_not_captured


def test_blocks_that_shards_kept_are_not_those_of_stages(tiny_bloom: Path, tmp_path: Path) -> None:
    flags = {"prefix_cache_disk_gb": 0.1, "prefix_cache_dir": str(tmp_path)}
    shard, found = config_of(tiny_bloom, tmp_path / "socket", **flags), set()
    for stage_sockets in ((), ("one", "other")):
        config = replace(shard, world_size=2, stage_sockets=stage_sockets)
        kept = tiers(config, pb.InfoReply(has_tiers=True, world_size=2))
        assert kept is not None
        found.add(kept.config.identity)
    assert 2 == len(found)
