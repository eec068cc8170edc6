"""Language codes, as used in test sets and configurations.

Only languages with a two-letter code (ISO 639-1) are known, because only they affect a score.
"""

from __future__ import annotations

import difflib
import re

from ziggurat.system.errors import ConfigError, Problem, printable

_TABLE = """
aa aar Afar; ab abk Abkhazian; ae ave Avestan; af afr Afrikaans; ak aka Akan; am amh Amharic; an arg
Aragonese; ar ara Arabic; as asm Assamese; av ava Avaric; ay aym Aymara; az aze Azerbaijani; ba bak Bashkir;
be bel Belarusian; bg bul Bulgarian; bi bis Bislama; bm bam Bambara; bn ben Bengali; bo bod/tib Tibetan; br
bre Breton; bs bos Bosnian; ca cat Catalan; ce che Chechen; ch cha Chamorro; co cos Corsican; cr cre Cree; cs
ces/cze Czech; cu chu Church Slavic; cv chv Chuvash; cy cym/wel Welsh; da dan Danish; de deu/ger German; dv
div Divehi; dz dzo Dzongkha; ee ewe Ewe; el ell/gre Modern Greek; en eng English; eo epo Esperanto; es spa
Spanish; et est Estonian; eu eus/baq Basque; fa fas/per Persian; ff ful Fulah; fi fin Finnish; fj fij Fijian;
fo fao Faroese; fr fra/fre French; fy fry Western Frisian; ga gle Irish; gd gla Scottish Gaelic; gl glg
Galician; gn grn Guarani; gu guj Gujarati; gv glv Manx; ha hau Hausa; he heb Hebrew; hi hin Hindi; ho hmo Hiri
Motu; hr hrv Croatian; ht hat Haitian; hu hun Hungarian; hy hye/arm Armenian; hz her Herero; ia ina
Interlingua; id ind Indonesian; ie ile Interlingue; ig ibo Igbo; ii iii Sichuan Yi; ik ipk Inupiaq; io ido
Ido; is isl/ice Icelandic; it ita Italian; iu iku Inuktitut; ja jpn Japanese; jv jav Javanese; ka kat/geo
Georgian; kg kon Kongo; ki kik Kikuyu; kj kua Kuanyama; kk kaz Kazakh; kl kal Kalaallisut; km khm Khmer; kn
kan Kannada; ko kor Korean; kr kau Kanuri; ks kas Kashmiri; ku kur Kurdish; kv kom Komi; kw cor Cornish; ky
kir Kirghiz; la lat Latin; lb ltz Luxembourgish; lg lug Ganda; li lim Limburgan; ln lin Lingala; lo lao Lao;
lt lit Lithuanian; lu lub Luba-Katanga; lv lav Latvian; mg mlg Malagasy; mh mah Marshallese; mi mri/mao Maori;
mk mkd/mac Macedonian; ml mal Malayalam; mn mon Mongolian; mr mar Marathi; ms msa/may Malay; mt mlt Maltese;
my mya/bur Burmese; na nau Nauru; nb nob Norwegian Bokmål; nd nde North Ndebele; ne nep Nepali; ng ndo Ndonga;
nl nld/dut Dutch; nn nno Norwegian Nynorsk; no nor Norwegian; nr nbl South Ndebele; nv nav Navajo; ny nya
Chichewa; oc oci Occitan; oj oji Ojibwa; om orm Oromo; or ori Oriya; os oss Ossetian; pa pan Panjabi; pi pli
Pali; pl pol Polish; ps pus Pushto; pt por Portuguese; qu que Quechua; rm roh Romansh; rn run Rundi; ro
ron/rum Romanian; ru rus Russian; rw kin Kinyarwanda; sa san Sanskrit; sc srd Sardinian; sd snd Sindhi; se sme
Northern Sami; sg sag Sango; sh hbs Serbo-Croatian; si sin Sinhala; sk slk/slo Slovak; sl slv Slovenian; sm
smo Samoan; sn sna Shona; so som Somali; sq sqi/alb Albanian; sr srp Serbian; ss ssw Swati; st sot Southern
Sotho; su sun Sundanese; sv swe Swedish; sw swa Swahili; ta tam Tamil; te tel Telugu; tg tgk Tajik; th tha
Thai; ti tir Tigrinya; tk tuk Turkmen; tl tgl Tagalog; tn tsn Tswana; to ton Tonga; tr tur Turkish; ts tso
Tsonga; tt tat Tatar; tw twi Twi; ty tah Tahitian; ug uig Uighur; uk ukr Ukrainian; ur urd Urdu; uz uzb Uzbek;
ve ven Venda; vi vie Vietnamese; vo vol Volapük; wa wln Walloon; wo wol Wolof; xh xho Xhosa; yi yid Yiddish;
yo yor Yoruba; za zha Zhuang; zh zho/chi Chinese; zu zul Zulu
"""
# Two-letter code, three-letter code (terminological/bibliographic), name: ISO 639.

_NAMES: dict[str, str] = {}  # two-letter code -> name
_SHORT: dict[str, str] = {"cmn": "zh"}  # three-letter code, or name in lower case -> two-letter code
for _entry in _TABLE.replace("\n", " ").split(";"):
    _code, _long, _name = _entry.strip().split(" ", 2)
    _NAMES[_code] = _name
    _SHORT |= dict.fromkeys([*_long.split("/"), _name.lower()], _code)

# Languages and scripts written from right to left; a language with several scripts is listed if its usual one is.
_FROM_THE_RIGHT = """
ar arc arb ary arz apc acm ajp aeb azb bal bgn bqi brh ckb dv fa glk he iw ji jrb khw ks lad lrc luz mzn nqo pbt pes pnb
prs ps rhg sam sd sdh skr syc syr tmr trw ug ur ydd yi az-iq az-ir kk-cn ku-iq ku-ir ky-cn pa-pk tg-pk uz-af
"""
_SCRIPTS_FROM_THE_RIGHT = """
adlm arab aran gara hebr mand mend nkoo rohg samr syrc syre syrj syrn thaa yezi
"""

_EMBEDDED = {"qlo": "Low Babel", "qhi": "High Babel"}  # ziggurat/data/babel.py; only for display


def main_language(code: str) -> str:
    """Return the two-letter code for `ja`, `jpn`, `ja-JP`, `zh_Hant` and the like; an unknown code unchanged."""
    first = _first(code)
    if first in _NAMES:
        return first
    return _SHORT.get(first, code) if len(first) == 3 else code


def is_right_to_left(code: str) -> bool:
    """Return whether a language is written from right to left, in the script of its code or its usual one."""
    first, *others = re.split("[-_.@]", code.strip().lower())
    short = main_language(first)
    if scripts := [part for part in others if len(part) == 4 and part.isalpha()]:
        return scripts[0] in _SCRIPTS_FROM_THE_RIGHT.split()
    return not {short, *(f"{short}-{part}" for part in others)}.isdisjoint(_FROM_THE_RIGHT.split())


def check_language_code(code: str, option: str) -> None:
    """Raise ConfigError unless main_language knows `code`; the message suggests similar ones.

    Codes for private use, qaa to qtz, are accepted: the embedded languages have such codes.
    """
    first = main_language(code)
    if first in _NAMES or (len(first) == 3 and "qaa" <= first.lower() <= "qtz"):
        return
    raise ConfigError(
        f"`{option} {printable(code)}`: not a language that affects a score{_meant(code)} It takes codes such as "
        "en, ja or zh-CN; for a language without a two-letter code, leave it out",
        key=option,
    )


def language_doubt(code: str, key: str) -> Problem | None:
    """Return a warning if `code`, the value of `key`, does not look like an ISO 639 code, for example a name.

    Three-letter codes never cause a warning, because thousands exist.
    """
    first = _first(code)
    if main_language(code) in _NAMES or (len(first) == 3 and first.isascii() and first.isalpha()):
        return None
    doubt = f"`{key}: {printable(code)}` is not an ISO 639 language code{_meant(first)}"
    return Problem(key, f"{doubt} Scores and default columns of corpora depend on it", severity="warning")


def _first(code: str) -> str:
    return code.replace("_", "-").partition("-")[0].lower()


def _meant(code: str) -> str:
    """Return the end of a sentence with the codes that `code` may mean, if any are similar."""
    wanted = code.lower()
    near = [wanted[:2]] if len(wanted) == 3 and wanted[:2] in _NAMES else []
    near += [_SHORT[name] for name in difflib.get_close_matches(wanted, _SHORT, n=1, cutoff=0.8)]
    known = list(dict.fromkeys(near))[:2]
    return f"; did you mean {' or '.join(f'`{c}` ({_NAMES[c]})' for c in known)}?" if known else "."


def language_name(code: str) -> str:
    """Return the English name of a language known to main_language or of the embedded pair; otherwise the code."""
    return _NAMES.get(main_language(code)) or _EMBEDDED.get(code, code)
