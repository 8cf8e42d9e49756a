"""Arguments are cut by what is known of them, never by their sizes alone."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from diffusers.models.controlnets.controlnet import ControlNetOutput
from torch import Tensor

from strop.dispatch.parallel.rules import ARGUMENTS, FAMILIES, ITEMS, ROWS, WHOLE, family_of
from strop.dispatch.parallel.split import NotSplitError, Splitter, joined
from strop.runtime.loop.denoise_loop import DenoiseLoop
from tests.e2e import tiny

CPU, META = torch.device("cpu"), torch.device("meta")


def cut(sizes: tuple[int, ...] = (1, 1), **call: Any) -> list[dict[str, Any]]:
    return Splitter([CPU] * len(sizes), DenoiseLoop()).pieces(call, sizes)


def rows(count: int) -> Tensor:
    return torch.arange(count * 3.0).view(count, 3)


def test_a_table_is_no_batch_though_it_looks_as_one() -> None:
    """Two positions of a prompt, under guidance."""
    first, second = cut(hidden_states=rows(2), txt_ids=rows(2), image_rotary_emb=(rows(2), rows(2)))
    assert torch.equal(first["hidden_states"], rows(2)[:1])
    assert torch.equal(second["hidden_states"], rows(2)[1:])
    for piece in (first, second):
        assert torch.equal(piece["txt_ids"], rows(2))
        assert torch.equal(piece["image_rotary_emb"][1], rows(2))


def test_what_is_nested_is_cut_too() -> None:
    pieces = cut(
        (2, 1),
        sample=rows(3),
        timestep=torch.tensor(7.0),
        down_block_additional_residuals=[rows(3), (rows(3),)],
        added_cond_kwargs={"time_ids": rows(3), "image_embeds": [rows(3)]},
        cross_attention_kwargs={"scale": 0.5, "ip_adapter_masks": [rows(3)]},
        guidance=torch.ones(1),
        return_dict=False,
    )
    for piece, size in zip(pieces, (2, 1), strict=True):
        residuals = piece["down_block_additional_residuals"]
        assert type(residuals) is list
        assert type(residuals[1]) is tuple
        assert [len(residuals[0]), len(residuals[1][0])] == [size, size]
        assert len(piece["added_cond_kwargs"]["image_embeds"][0]) == size
        assert piece["cross_attention_kwargs"]["scale"] == 0.5
        assert len(piece["cross_attention_kwargs"]["ip_adapter_masks"][0]) == 3
        assert piece["timestep"].dim() == 0
        assert piece["guidance"].shape == (1,)  # one for all
        assert piece["return_dict"] is False


def test_lists_have_an_item_for_each_picture() -> None:
    shapes = [[(1, 4, 4)], [(1, 4, 4)], [(1, 4, 4)]]
    assert [piece["img_shapes"] for piece in cut((2, 1), img_shapes=shapes)] == [
        shapes[:2],
        shapes[2:],
    ]
    assert cut((2, 1), img_shapes=shapes[:1])[1]["img_shapes"] == shapes[:1]
    with pytest.raises(NotSplitError, match="no list with a list"):
        cut((2, 1), img_shapes=[(1, 4, 4), (1, 4, 4), (1, 4, 4)])  # those of one picture


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"of_tomorrow": rows(2)}, "nothing says whether of_tomorrow"),
        ({"added_cond_kwargs": {"hint": rows(2)}}, "nothing says whether added_cond_kwargs.hint"),
        ({"encoder_hidden_states": rows(4)}, r"encoder_hidden_states is \(4, 3\) for 2 rows"),
        ({"encoder_hidden_states": {1, 2}}, "encoder_hidden_states is a set"),
        ({"added_cond_kwargs": [rows(2)]}, "added_cond_kwargs is a list"),
        ({"sample": rows(2).to_sparse()}, "a class or layout of its own"),
        ({"img_shapes": [[], [], []]}, "3 items for 2 rows"),
    ],
)
def test_what_nobody_knows_is_not_cut(call: dict[str, Any], said: str) -> None:
    with pytest.raises(NotSplitError, match=said):
        cut(**call)


def test_results_are_joined_as_they_come() -> None:
    Pair = namedtuple("Pair", "one other")
    halves = [ControlNetOutput((rows(1), rows(1)), rows(1) + n) for n in range(2)]
    whole = joined(halves, (1, 1), CPU)
    assert type(whole) is ControlNetOutput
    assert [len(t) for t in whole.down_block_res_samples] == [2, 2]
    assert torch.equal(whole.mid_block_res_sample, torch.cat([rows(1), rows(1) + 1]))
    assert joined([Pair(rows(2), None), Pair(rows(1), None)], (2, 1), CPU).one.shape == (3, 3)
    with pytest.raises(NotSplitError, match="other rows"):
        joined([rows(2), rows(2)], (2, 1), CPU)
    with pytest.raises(NotSplitError, match="of its own for each"):
        joined([1.0, 2.0], (1, 1), CPU)
    with pytest.raises(NotSplitError, match="is a set"):
        joined([{1}, {1}], (1, 1), CPU)


def test_only_what_lies_with_the_model_goes_to_another_device() -> None:
    splitter = Splitter([META, CPU], DenoiseLoop())
    table = rows(2)
    first, second = splitter.pieces({"hidden_states": table}, (1, 1))
    assert first["hidden_states"].device == second["hidden_states"].device == CPU
    there = Splitter([CPU, META], DenoiseLoop()).pieces({"hidden_states": table}, (1, 1))
    assert [piece["hidden_states"].device for piece in there] == [CPU, META]


def test_a_loop_copies_once_what_stays_the_same() -> None:
    """What a device keeps for a loop is known by the very tensors."""
    loop = DenoiseLoop()
    splitter, prompt = Splitter([CPU, META], loop), rows(2)

    def pieces() -> list[Tensor]:
        found = splitter.pieces({"encoder_hidden_states": prompt}, (1, 1))
        return [piece["encoder_hidden_states"] for piece in found]

    assert pieces()[1] is not pieces()[1]  # there is no loop
    loop.begin()
    known = pieces()
    assert all(a is b for a, b in zip(known, pieces(), strict=True))
    prompt.mul_(2)
    assert not any(a is b for a, b in zip(known, pieces(), strict=True))
    known = pieces()
    loop.begin()
    assert not any(a is b for a, b in zip(known, pieces(), strict=True))
    with torch.inference_mode():
        prompt = rows(2)  # nobody counts what is written to it
    assert pieces()[1] is not pieces()[1]


def test_a_timestep_is_a_place_among_those_of_the_loop_on_any_device() -> None:
    loop, timesteps = DenoiseLoop(), torch.tensor([9.0, 5.0, 1.0])
    splitter = Splitter([CPU, META], loop)
    loop.begin(timesteps)
    there = splitter.timesteps_on(META)
    assert there is splitter.timesteps_on(META)
    assert there is not None
    assert there.device == META
    for given in (timesteps[1], timesteps[1].expand(2)):
        found = splitter.pieces({"timestep": given}, (1, 1))[1]["timestep"]
        assert found._base is there
        assert found.storage_offset() == 1
    loop.begin(timesteps + 1)
    assert splitter.timesteps_on(META) is not there


def test_the_rules_are_about_arguments_that_there_are() -> None:
    import inspect

    import diffusers

    taken: set[str] = set()
    for name, family in FAMILIES.items():
        parameters = inspect.signature(getattr(diffusers, name).forward).parameters
        assert family.lead in parameters, name
        taken |= {*parameters}
    assert ARGUMENTS.keys() <= taken | {"img_shapes"}
    kinds = [
        k
        for kind in ARGUMENTS.values()
        for k in (kind.values() if hasattr(kind, "values") else [kind])
    ]
    assert {*kinds} == {ROWS, WHOLE, ITEMS}
    assert family_of(tiny.unet()) is not None

    class Own(type(tiny.unet())):  # type: ignore[misc]
        """It may do anything."""

    assert family_of(Own.__new__(Own)) is None
