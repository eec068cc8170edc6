"""Text repair with ftfy."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.data.cleaning.filters import repair_with
from ziggurat.system.errors import ConfigError


@pytest.mark.parametrize(
    ("broken", "whole"),
    [
        ("fÃ¼r die Ã„rzte", "für die Ärzte"),
        ("Fisch &amp; Chips", "Fisch & Chips"),
        ("naÃ¯ve cafÃ©", "naïve café"),
        ("a\x1b[31mred\x1b[0m", "ared"),
        ("â€œquotedâ€\x9d", "“quoted”"),
        ("Ñ‡Ð¸ÑÐ»Ð°", None),  # Cyrillic
    ],
)
def test_wrongly_decoded_text_is_repaired(broken: str, whole: str | None) -> None:
    whole = whole or broken.encode("windows-1252", "replace").decode("utf-8", "replace")
    found, changed = repair_with()([broken, "heil"])
    assert changed.tolist() == [True, False]
    assert found[1] == "heil"
    if "\ufffd" not in whole:
        assert found[0] == whole


@pytest.mark.parametrize("text", ["„So“", "ﬁne", "Ｆｕｌｌ", "e\u0301", "für", "日本語", "a & b", "<b>", "\0fÃ¼r"])
def test_correct_text_stays(text: str) -> None:
    found, changed = repair_with()([text])
    assert found == [text]
    assert not changed.any()


WORDS = st.sampled_from(["für", "Ärzte", "Straße", "café", "naïve", "señor", "und", "the", "Œuvre", "Łódź", "100"])


@given(st.lists(st.lists(WORDS, min_size=1, max_size=6).map(" ".join), max_size=5))
def test_text_decoded_as_windows_1252_is_restored(texts: list[str]) -> None:
    """Intact text stays unchanged."""
    repaired = repair_with()
    found, changed = repaired(texts)
    assert found == texts
    assert not changed.any()
    broken = [text.encode().decode("latin-1") for text in texts]
    found, changed = repaired(broken)
    assert found == texts
    assert changed.tolist() == [before != after for before, after in zip(broken, texts, strict=True)]


def test_without_ftfy_the_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def importing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "ftfy":
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    from ziggurat.data.cleaning import filters as repair

    repair._fixer.cache_clear()
    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(ConfigError, match=r"data\.filters\.repair: needs ftfy.*ziggurat-mt\[clean\]"):
        repair_with()
