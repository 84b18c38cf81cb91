"""Languages, and the ids that corpora, metrics and prompts use for the same language.

Tags and names are those of BCP-47 and CLDR, from the package `langcodes`. Exceptions are below.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import lru_cache
from typing import NamedTuple

import langcodes
from langcodes.data_dicts import LIKELY_SUBTAGS
from langcodes.tag_parser import LanguageTagError


class Language(NamedTuple):
    """A language.

    madlad: MADLAD-400 id.
    tag: BCP-47 with region.
    name: English name.
    """

    madlad: str
    iso639_3: str
    tag: str
    name: str


#: The languages of MADLAD-400 by their ids there, from Table B.4 of arXiv 2510.22037, by authors of
#: the corpus. `zxx_xx_dtynoise` is noise.
_MADLAD_IDS = """
abt ace acf ach ada adh ady af agr ahk ak akb alt alz am amu ang ann ape ar arn as av awa ay az
az_RU ba ban bas bbc bci be ber ber_Latn bew bg bg_Latn bgp bho bi bik bim bm bn bn_Latn bo bqc br
bru brx bs bts btx bua bum bus bzj ca cab cac cak cbk cce ce ceb cfm ch chk chm chr ckb cnh co
cr_Latn crh crs cs ctd_Latn ctu cuk cv cy da de din dje djk dln doi dov dtp dv dwr dyu dz ee el
el_Latn emp en enq eo es et eu fa ff ffm fi fil fj fo fon fr frp fy ga gag gbm gd gil gl gn gof
gom gom_Latn gor grc gsw gu gu_Latn gub guc guh gui gv gvl gym ha haw hi hi_Latn hif hil hmn hne
ho hr ht hu hui hus hvn hy iba ibb id ify ig ilo inb is iso it iu ium iw izz ja jac jam jiv jv jvn
ka kaa kaa_Latn kac kbd kbp kek kg kha kj kjg kjh kk kl km kmb kmz_Latn kn kn_Latn knj ko koi kos
krc kri ksd ksw ktu ku kum kv kw kwi ky la laj lb lg lhu ln lo lrc lt ltg lu lus lv mad mag mai
mak mam mas maz mbt mdf meo meu mfe mg mgh mh mi min miq mk mkn ml ml_Latn mn mni mps mqy mr mrj
mrw ms ms_Arab ms_Arab_BN msb msi msm mt my myv nan_Latn_TW ndc_ZW ne new ngu nhe nia nij niq nl
nnb no noa nog nr nso nut nv ny nyu nzi oc oj om or os otq pa pag pap pau pck pis pl pon ppk ps pt
qu qub quc quf quh qup quy qvc qvi qvz qxr raj rcf rki rm rmc rn ro rom ru ru_Latn rw rwo sa sah
sat_Latn sd sda se seh sg shn shp si sja sk skr sl sm smt sn so spp sq sr srm srn ss st stq su sus
suz sv sw sxn syr ta ta_Latn tab taj tbz tca tcy tdx te te_Latn teo tet tg th ti tiv tk tks tlh
tll tly_IR tn to toj tr trp ts tsc tsg tt tuc tvl twu tyv tyz tzh tzj tzo ubu udm ug uk ur uz ve
vec vi wa wal war wo xal xh yap yi yo yua zap zh zh_Latn zne zu zxx_xx_dtynoise zza
"""
MADLAD_IDS = tuple(_MADLAD_IDS.split())
#: Names and usual regions that differ from CLDR's.
_NAMES = {"bn": "Bengali", "fa": "Farsi"}
_REGIONS = {"bn": "IN", "es": "MX", "grc": "GR", "sw": "KE"}
#: Languages that MADLAD-400 files under another code.
_FILED_UNDER = {"he": "iw", "nb": "no"}
#: Other names in use.
_OTHER_NAMES = {"persian": "fa", "bangla": "bn", "mandarin": "zh"}
#: Languages with several standards: the name always says which one.
_STANDARDS = frozenset({"pt", "zh"})
_HAN_NAMES = {"Hans": "Simplified", "Hant": "Traditional"}
_TAG = re.compile(r"[a-z]{1,8}(-[a-z0-9]{1,8})*")
_MAX_CHARS = 100
_MADLAD_BY_KEY = {madlad.lower().replace("_", "-"): madlad for madlad in MADLAD_IDS}


class LanguageMatch(NamedTuple):
    """A language, and the variant that its key names.

    names_variant: whether the key itself names a script, region or variant.
    script: ISO 15924 code of the script that the tag names or implies, None if CLDR knows none.
    scripts: scripts of a language that was added, by their names in
    scorekit/text/writing_scripts.py."""

    language: Language
    names_variant: bool
    script: str | None
    scripts: tuple[str, ...] | None = None


_ADDED: dict[str, LanguageMatch] = {}


def find_language(key: str) -> Language | None:
    """Return the language of an id, code, tag or English name in any case, or None if it is
    unknown.

    A script or region that the key names stays in its `tag` ("zh_tw": "zh-TW"). A key without one
    gets the usual region ("ko": "ko-KR"). Compare `iso639_3` to find the same language in any
    variant.
    """
    match = look_up(key)
    return match.language if match else None


def look_up(key: str) -> LanguageMatch | None:
    """Return the language of a key, and the variant that the key names."""
    key = key.strip().lower().replace("_", "-")
    if not key or len(key) > _MAX_CHARS:
        return None
    return _ADDED.get(key) or _find(key)


def language_name(key: str) -> str:
    """Return the English name of a language, as a prompt uses it.

    It includes the script and region that the key names if they are not the usual ones ("ko-KR":
    "Korean", "sr-Latn": "Serbian (Latin script)", "zh-TW": "Traditional Chinese (Taiwan)"). An
    unknown key is returned as it is."""
    match = look_up(key)
    if match is None:
        return key
    name, tag = match.language.name, match.language.tag
    if not match.names_variant:
        return name
    parsed = langcodes.Language.get(tag)
    primary = str(parsed.language)
    usual = _usual_tag(primary)
    if tag == usual and primary not in _STANDARDS:
        return name
    more = []
    if match.script in _HAN_NAMES:
        name = f"{_HAN_NAMES[match.script]} {name}"
    elif parsed.script or match.script != _script(primary):
        more.append(f"{langcodes.Language.make(script=match.script).script_name()} script")
    if parsed.territory and (primary == "pt" or not usual.endswith(f"-{parsed.territory}")):
        more.append(parsed.territory_name().removesuffix(" SAR China"))
    more += parsed.variants or []
    return f"{name} ({', '.join(more)})" if more else name


def short_tag(tag: str) -> str:
    """Return the tag without its usual region: "ko" for "ko-KR", but "zh-TW"."""
    primary = tag.split("-")[0]
    return primary if primary not in _ADDED and tag == _usual_tag(primary) else tag


def unknown_language(key: str) -> str:
    """Return a line that calls the language unknown and suggests close ones."""
    near = get_close_matches(key.strip().lower(), _names(), n=3, cutoff=0.7)
    suggestion = ", ".join(
        dict.fromkeys(f"{_names()[name][1]} ({_names()[name][0]})" for name in near)
    )
    return f"unknown language {key!r}" + (f"; did you mean {suggestion}?" if suggestion else "")


def add_language(
    code: str, name: str, *, madlad: str | None = None, scripts: tuple[str, ...] = ()
) -> None:
    """Add a language, by code and by name, for this process.

    scripts: their names in scorekit/text/writing_scripts.py; empty: not checked. Raises ValueError
    if the code is not a language tag.
    """
    if not _TAG.fullmatch(code.lower()):
        raise ValueError(f"{code!r} is not a language tag. Use letters, digits and hyphens")
    match = LanguageMatch(Language(madlad or code, code, code, name), True, None, scripts)
    _ADDED[code.lower()] = _ADDED[name.lower()] = match


@lru_cache(maxsize=4096)
def _find(key: str) -> LanguageMatch | None:
    if key in _MADLAD_BY_KEY and key not in ("iw", "zxx-xx-dtynoise"):
        return _of_tag(langcodes.Language.get(key))
    if key == "zxx-xx-dtynoise":
        return LanguageMatch(
            Language(_MADLAD_BY_KEY[key], "zxx", "zxx", "No linguistic content"), False, None
        )
    parsed = _parsed(_OTHER_NAMES.get(key, key)) or _named(key)
    return _of_tag(parsed) if parsed else None


def _parsed(key: str) -> langcodes.Language | None:
    """Return a registered language by its tag; None for a private tag or one that is no
    language."""
    if not _TAG.fullmatch(key):
        return None
    try:
        parsed = langcodes.Language.get(key)
    except LanguageTagError:
        return None
    is_registered = parsed.language not in (None, "und", "mul", "mis") and parsed.is_valid()
    return parsed if is_registered and "[" not in parsed.language_name() else None


def _named(name: str) -> langcodes.Language | None:
    """Return the language with exactly this English name or name in the language itself.

    `langcodes.find` alone also returns close matches."""
    if not name.isprintable():  # a NUL crashes `find`
        return None
    try:
        candidate = langcodes.find(name, language="en")
    except LookupError:
        return None
    names = (candidate.language_name(), candidate.display_name(), candidate.autonym())
    if name in (candidate_name.lower() for candidate_name in names):
        return candidate
    return candidate if name == language_name(candidate.to_tag()).lower() else None


def _of_tag(parsed: langcodes.Language) -> LanguageMatch:
    names_variant = bool(parsed.script or parsed.territory or parsed.variants)
    macro_language = str(langcodes.standardize_tag(str(parsed.language), macro=True))
    if macro_language != parsed.language and "-" not in macro_language:  # cmn is zh, pes is fa
        parsed = parsed.update(langcodes.Language.make(language=macro_language))
    primary = str(parsed.language)
    try:
        iso639_3 = langcodes.Language.get(primary).to_alpha3()
    except LookupError:
        iso639_3 = primary
    tag = parsed.to_tag() if names_variant else _usual_tag(primary)
    name = _NAMES.get(primary) or langcodes.Language.get(primary).language_name()
    return LanguageMatch(
        Language(_madlad_id(parsed), iso639_3, tag, name), names_variant, _script(parsed.to_tag())
    )


def _madlad_id(parsed: langcodes.Language) -> str:
    """Return the id of exactly this variant, if MADLAD-400 has it, else that of the language."""
    primary = str(parsed.language)
    parts = ((parsed.script, parsed.territory), (parsed.script,), (parsed.territory,))
    for more in parts:
        key = "-".join(str(part) for part in (primary, *more) if part).lower()
        if key != primary and key in _MADLAD_BY_KEY:
            return _MADLAD_BY_KEY[key]
    return _FILED_UNDER.get(primary, primary)


def _usual_tag(primary: str) -> str:
    """Return the tag with the region that a bare language code implies."""
    likely = langcodes.Language.get(primary).maximize().territory
    region = _REGIONS.get(primary, likely if primary in LIKELY_SUBTAGS else None)
    return f"{primary}-{region}" if region and region != "001" else primary


def _script(tag: str) -> str | None:
    """Return the script that a tag names, or else the one that CLDR calls likely."""
    parsed = langcodes.Language.get(tag)
    if parsed.script or str(parsed.language) in LIKELY_SUBTAGS:
        script: str | None = parsed.maximize().script
        return script
    return None


@lru_cache(maxsize=1)
def _names() -> dict[str, tuple[str, str]]:
    """Return name or code in lower case -> (code, name) of MADLAD's languages."""
    names = {}
    for madlad in MADLAD_IDS:
        match = _find(madlad.lower().replace("_", "-"))
        assert match is not None
        tag = madlad.replace("_", "-")
        names[match.language.name.lower()] = names[tag.lower()] = (tag, language_name(tag))
    return names
