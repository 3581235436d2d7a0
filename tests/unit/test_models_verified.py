"""The table of what was verified says no more and no less than the tests that run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures import tiny, tiny_latent
from golden import test_gemma3, test_logits, test_logits_moe, test_smollm2
from sparseengine.cli.models import family_rows, shape_rows
from sparseengine.models import MODELS
from sparseengine.models.verified import VERIFIED
from sparseengine.weights.dummy import shape_config, shape_names


def names_of_golden_families() -> set[str]:
    """Architectures whose logits some golden test compares with transformers'."""
    classes = [row[1] for row in tiny._FAMILIES.values()]
    classes += [row[1] for row in tiny_latent._FAMILIES.values()]
    classes += [row[1] for row in test_logits_moe.FAMILIES.values()]
    return {c.__name__ for c in classes} | {type(tiny.gemma3_with_pictures()).__name__}


def test_every_family_is_listed_once_and_compared() -> None:
    assert set(VERIFIED) == set(MODELS)
    compared = names_of_golden_families()
    assert {name for name, found in VERIFIED.items() if found.logits} == compared == set(MODELS)
    assert test_logits.CASES
    assert {row["architecture"] for row in family_rows()} == set(MODELS)


def test_published_checkpoints_are_those_of_the_golden_tests() -> None:
    claimed = {found.weights for found in VERIFIED.values()} - {""}
    assert claimed == {"SmolLM2-135M", "Gemma 3 270M"}
    assert test_smollm2.test_greedy_tokens_equal_the_oracle
    assert test_gemma3.test_greedy_tokens_equal_the_oracle


def test_device_claims_name_shapes_that_a_device_test_runs() -> None:
    tests = "".join(
        p.read_text(encoding="utf-8") for p in (Path(__file__).parents[1] / "gpu").glob("test_*.py")
    )
    for name, found in VERIFIED.items():
        if found.device:
            assert shape_config(found.device)["architectures"] == [name]
            assert f'"{found.device}"' in tests


@pytest.mark.parametrize("row", shape_rows(), ids=lambda row: row["shape"])
def test_shapes_are_listed_with_their_size(row: dict[str, object]) -> None:
    assert row["shape"] in shape_names()
    assert isinstance(row["parameters"], int)
    assert row["parameters"] > 1e8
