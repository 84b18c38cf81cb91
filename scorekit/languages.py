"""What languages there are: the ids that corpora, metrics and prompts use for the same language.

Tags and names are those of BCP-47 and CLDR, by the package `langcodes`; our few facts stand here.
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
    """madlad: MADLAD-400 id; iso639_3; tag: BCP-47 with region; name: English name."""

    madlad: str
    iso639_3: str
    tag: str
    name: str


#: The languages of MADLAD-400 by their ids there, as Table B.4 of arXiv 2510.22037 has them, by
#: authors of the corpus. `zxx_xx_dtynoise` is what the corpus takes for noise.
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
#: Names and usual regions where ours are not CLDR's.
_NAMES = {"bn": "Bengali", "fa": "Farsi"}
_REGIONS = {"bn": "IN", "es": "MX", "grc": "GR", "sw": "KE"}
#: Languages that MADLAD-400 files under another code.
_FILED_UNDER = {"he": "iw", "nb": "no"}
#: Other names in use.
_OTHER_NAMES = {"persian": "fa", "bangla": "bn", "mandarin": "zh"}
#: Languages with several standards: which one is always said.
_STANDARDS = frozenset({"pt", "zh"})
_HAN_NAMES = {"Hans": "Simplified", "Hant": "Traditional"}
_TAG = re.compile(r"[a-z]{1,8}(-[a-z0-9]{1,8})*")
_MOST_CHARS = 100
_MADLAD_BY_KEY = {madlad.lower().replace("_", "-"): madlad for madlad in MADLAD_IDS}


class Found(NamedTuple):
    """said: whether the key itself names a script, region or variant. script: the ISO 15924 code of
    the script that the tag names or implies, None where CLDR knows none. scripts: those of a
    language that was added, by their names in scorekit/text/writing_scripts.py."""

    language: Language
    said: bool
    script: str | None
    scripts: tuple[str, ...] | None = None


_ADDED: dict[str, Found] = {}


def find_language(key: str) -> Language | None:
    """The language of an id, code, tag or English name in any case; None where none is known.

    A script or region that the key names stays in its `tag` ("zh_tw": "zh-TW"); where it names
    none, the tag has the usual region ("ko": "ko-KR"). To ask for the same language in whatever
    variant compare `iso639_3`.
    """
    found = look_up(key)
    return found.language if found else None


def look_up(key: str) -> Found | None:
    """`find_language`, with what the key says of a variant."""
    key = key.strip().lower().replace("_", "-")
    if not key or len(key) > _MOST_CHARS:
        return None
    return _ADDED.get(key) or _find(key)


def language_name(key: str) -> str:
    """What a prompt calls a language: its English name, with the script and region that the key
    names where they are not the usual ones ("ko-KR": "Korean", "sr-Latn": "Serbian (Latin script)",
    "zh-TW": "Traditional Chinese (Taiwan)"). An unknown key is its own name."""
    found = look_up(key)
    if found is None:
        return key
    name, tag = found.language.name, found.language.tag
    if not found.said:
        return name
    parsed = langcodes.Language.get(tag)
    primary = str(parsed.language)
    usual = _usual_tag(primary)
    if tag == usual and primary not in _STANDARDS:
        return name
    more = []
    if found.script in _HAN_NAMES:
        name = f"{_HAN_NAMES[found.script]} {name}"
    elif parsed.script or found.script != _script(primary):
        more.append(f"{langcodes.Language.make(script=found.script).script_name()} script")
    if parsed.territory and (primary == "pt" or not usual.endswith(f"-{parsed.territory}")):
        more.append(parsed.territory_name().removesuffix(" SAR China"))
    more += parsed.variants or []
    return f"{name} ({', '.join(more)})" if more else name


def short_tag(tag: str) -> str:
    """The tag without the region that is usual anyway: "ko" for "ko-KR", but "zh-TW"."""
    primary = tag.split("-")[0]
    return primary if primary not in _ADDED and tag == _usual_tag(primary) else tag


def unknown_language(key: str) -> str:
    """A line that says so, and names what is near."""
    near = get_close_matches(key.strip().lower(), _names(), n=3, cutoff=0.7)
    told = ", ".join(dict.fromkeys(f"{_names()[name][1]} ({_names()[name][0]})" for name in near))
    return f"unknown language {key!r}" + (f"; near it: {told}" if told else "")


def add_language(
    code: str, name: str, *, madlad: str | None = None, scripts: tuple[str, ...] = ()
) -> None:
    """Let this process know a language of the caller's own, by code and by name.

    scripts: their names in scorekit/text/writing_scripts.py; none: not checked. Raises ValueError
    for a code that is no tag.
    """
    if not _TAG.fullmatch(code.lower()):
        raise ValueError(f"{code!r} is no language tag: letters, digits and hyphens")
    found = Found(Language(madlad or code, code, code, name), True, None, scripts)
    _ADDED[code.lower()] = _ADDED[name.lower()] = found


@lru_cache(maxsize=4096)
def _find(key: str) -> Found | None:
    if key in _MADLAD_BY_KEY and key not in ("iw", "zxx-xx-dtynoise"):
        return _of_tag(langcodes.Language.get(key))
    if key == "zxx-xx-dtynoise":
        return Found(
            Language(_MADLAD_BY_KEY[key], "zxx", "zxx", "No linguistic content"), False, None
        )
    parsed = _parsed(_OTHER_NAMES.get(key, key)) or _named(key)
    return _of_tag(parsed) if parsed else None


def _parsed(key: str) -> langcodes.Language | None:
    """A tag of a registered language. A private one, or no language at all, is none."""
    if not _TAG.fullmatch(key):
        return None
    try:
        parsed = langcodes.Language.get(key)
    except LanguageTagError:
        return None
    known = parsed.language not in (None, "und", "mul", "mis") and parsed.is_valid()
    return parsed if known and "[" not in parsed.language_name() else None


def _named(name: str) -> langcodes.Language | None:
    """The language of exactly this English name (or its own name for itself): `find` alone takes
    what is merely near."""
    if not name.isprintable():  # a NUL brings `find` down
        return None
    try:
        found = langcodes.find(name, language="en")
    except LookupError:
        return None
    names = (found.language_name(), found.display_name(), found.autonym())
    if name in (known.lower() for known in names):
        return found
    return found if name == language_name(found.to_tag()).lower() else None


def _of_tag(parsed: langcodes.Language) -> Found:
    said = bool(parsed.script or parsed.territory or parsed.variants)
    whole = str(langcodes.standardize_tag(str(parsed.language), macro=True))
    if whole != parsed.language and "-" not in whole:  # cmn is zh, pes is fa
        parsed = parsed.update(langcodes.Language.make(language=whole))
    primary = str(parsed.language)
    try:
        iso639_3 = langcodes.Language.get(primary).to_alpha3()
    except LookupError:
        iso639_3 = primary
    tag = parsed.to_tag() if said else _usual_tag(primary)
    name = _NAMES.get(primary) or langcodes.Language.get(primary).language_name()
    return Found(Language(_madlad_id(parsed), iso639_3, tag, name), said, _script(parsed.to_tag()))


def _madlad_id(parsed: langcodes.Language) -> str:
    """The id of exactly this variant, where MADLAD-400 has it by itself; else of the language."""
    primary = str(parsed.language)
    parts = ((parsed.script, parsed.territory), (parsed.script,), (parsed.territory,))
    for more in parts:
        key = "-".join(str(part) for part in (primary, *more) if part).lower()
        if key != primary and key in _MADLAD_BY_KEY:
            return _MADLAD_BY_KEY[key]
    return _FILED_UNDER.get(primary, primary)


def _usual_tag(primary: str) -> str:
    """The tag with the region that is meant where none is said."""
    likely = langcodes.Language.get(primary).maximize().territory
    region = _REGIONS.get(primary, likely if primary in LIKELY_SUBTAGS else None)
    return f"{primary}-{region}" if region and region != "001" else primary


def _script(tag: str) -> str | None:
    """The script that a tag names, or that CLDR says is likely."""
    parsed = langcodes.Language.get(tag)
    if parsed.script or str(parsed.language) in LIKELY_SUBTAGS:
        script: str | None = parsed.maximize().script
        return script
    return None


@lru_cache(maxsize=1)
def _names() -> dict[str, tuple[str, str]]:
    """Name or code in lower case -> (code, name), of MADLAD's languages."""
    names = {}
    for madlad in MADLAD_IDS:
        found = _find(madlad.lower().replace("_", "-"))
        assert found is not None
        tag = madlad.replace("_", "-")
        names[found.language.name.lower()] = names[tag.lower()] = (tag, language_name(tag))
    return names
