"""Which replica is best for a batch, and whose turn it is; no Ray is needed."""

from __future__ import annotations

from dataclasses import replace

from strop.drawing.request import PictureRequest, PictureSize
from strop.serve.replicas.turns import WaitingTurns
from strop.serve.replicas.warmth import WarmReplicas, Warmth, warmth_of
from strop.serve.studio import PictureBatch

ALL = ["a", "b", "c"]
PLAIN, INK = Warmth("small", ()), Warmth("small", "ink")
LARGE = Warmth("large", ())


def test_nobody_is_warm() -> None:
    assert WarmReplicas().ranks(ALL, PLAIN) == [ALL]


def test_the_size_comes_before_the_adapters() -> None:
    warm = WarmReplicas()
    warm.note("a", LARGE)
    warm.note("b", INK)
    warm.note("c", PLAIN)
    assert warm.ranks(ALL, PLAIN) == [["c"], ["b"], ["a"]]
    assert warm.ranks(ALL, INK) == [["b"], ["c"], ["a"]]
    assert warm.ranks(ALL, LARGE) == [["a"], ["c"], ["b"]]


def test_only_the_last_adapters_are_there() -> None:
    warm = WarmReplicas()
    warm.note("a", INK)
    warm.note("a", PLAIN)
    warm.note("b", INK)
    assert warm.ranks(["a", "b"], INK) == [["b"], ["a"]]


def test_a_new_size_goes_where_the_fewest_are() -> None:
    warm = WarmReplicas()
    warm.note("a", PLAIN)
    warm.note("a", LARGE)
    warm.note("b", PLAIN)
    assert warm.ranks(ALL, Warmth("wide", "ink")) == [["c"], ["b"], ["a"]]


def test_who_is_gone_is_forgotten() -> None:
    warm = WarmReplicas()
    warm.note("a", PLAIN)
    warm.keep(["b"])
    assert warm.ranks(["a", "b"], PLAIN) == [["a", "b"]]


def test_the_oldest_of_many_sizes_are_forgotten() -> None:
    warm = WarmReplicas()
    for size in range(600):
        warm.note("a", Warmth(size, ()))
    assert warm.ranks(["b", "a"], Warmth(0, ())) == [["b"], ["a"]]
    assert warm.ranks(["b", "a"], Warmth(599, ())) == [["a"], ["b"]]


def test_what_a_batch_leaves_warm() -> None:
    first = PictureRequest("x", PictureSize(64, 32), 4, 1.0)
    batch = PictureBatch([first], (("ink", 0.5),))
    assert warmth_of(batch) == warmth_of(PictureBatch([replace(first, seed=3)], batch.adapters))
    turned = replace(first, size=PictureSize(32, 64))
    assert warmth_of(PictureBatch([turned], batch.adapters)).size != warmth_of(batch).size
    assert warmth_of(PictureBatch([first])).adapters != warmth_of(batch).adapters
    assert warmth_of(replace(batch, is_eager=True)).size != warmth_of(batch).size


def _never() -> bool:
    return False


def test_whoever_has_waited_longest_comes_first() -> None:
    turns = WaitingTurns()
    assert turns.is_next("old", 10.0, _never, 10.0)
    assert turns.is_next("new", 10.1, _never, 10.2), "replicas may be idle"
    assert not turns.is_next("new", 10.1, _never, 10.5)
    assert turns.is_next("old", 10.0, _never, 10.5)


def test_who_is_served_or_gone_keeps_nobody_waiting() -> None:
    turns, served = WaitingTurns(), [False]
    turns.is_next("old", 10.0, lambda: served[0], 10.0)
    assert not turns.is_next("new", 10.1, _never, 11.0)
    served[0] = True
    assert turns.is_next("new", 10.1, _never, 11.0)
    turns.is_next("silent", 5.0, _never, 12.0)
    assert not turns.is_next("new", 10.1, _never, 16.0)
    assert turns.is_next("new", 10.1, _never, 18.0)
