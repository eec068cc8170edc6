"""Language codes: the direction in which the languages are written."""

from __future__ import annotations

import pytest

from ziggurat.config.languages import is_right_to_left


@pytest.mark.parametrize(
    "code",
    ["ar", "AR", "ara", "ar-EG", "ar_SA.UTF-8", "arb_Arab", "he", "iw", "heb_Hebr", "yi", "fa", "pes_Arab", "ur-PK",
     "ps", "ckb", "dv", "ug", "sd", "az-Arab", "az_IR", "kas_Arab", "pa-PK", "uz-Arab-AF", "ff-Adlm", "nqo_Nkoo", "syr",
     "ar@x"],
)  # fmt: skip
def test_languages_from_right_to_left(code: str) -> None:
    assert is_right_to_left(code)


@pytest.mark.parametrize(
    "code",
    ["", "en", "de-AT", "ar-Latn", "kas_Deva", "sd-Deva-IN", "az", "az-Latn-IR", "pa-IN", "ku", "uz", "zh-Hant", "ja",
     "tr", "mt", "hy", "qlo", "und", "arn", "hebrew?"],
)  # fmt: skip
def test_languages_from_left_to_right(code: str) -> None:
    assert not is_right_to_left(code)
