"""Meta text: what a chat model says about its work, before, after or instead of a translation.

Each function is pure and returns the matching text, or None. If the source says the same, in any
language known here, its translation may, too: a talk may begin with "I'm sorry, but I can't". So
each pattern has an excuse, which is searched in the source.

Structure is stronger evidence than phrases: words about translating, a line, sentence, bracket or
label that the source lacks. `python -m bench.filters` measures what is detected.
"""

from __future__ import annotations

import re

from scorekit.text.sentences import split_sentences

_EDGE = r"[\s\"'“”‘’「『\[(（【<*_#>-]{0,9}+"
#: Characters of a source that are searched for an excuse.
_HEAD = 300

# -- words of translating --------------------------------------------------------------------------

#: Words about a translation. "translate into" and "übersetzen in" can be idioms.
_TRANSLATION = (
    r"\btranslat(?:(?:ed|es?|ing)\b(?! (?:as|roughly"
    r"|loosely)\b)(?![^.\n]{0,30}?\b(?:in)?to\b(?! (?:english|german|korean|chinese)))|ions?\b"
    r"|ors?['’])|번역(?!되)|(?:직|의)역(?= ?[:：)）]|하면|입니다|했|이[에며])|역주|옮긴이|翻[译譯]"
    r"|[译譯](?:文|成|[为為]|注|註|者注)|[直意][译譯]|翻訳|和訳|訳文|(?:日本語|直|意)訳|訳注"
    r"|\b(?<!in worte )(?<!in taten )(?<!in die praxis )übersetz|\btraducci[oó]n|\btraduction\b"
    r"|\btraduzion|\btradução|\bвот (?:ваш )?перевод"
)
#: A source with one of these may be translated with such a word.
_TRANSLATING = (
    r"translat|번역|직역|의역|옮기|옮긴|옮겼|翻|译|譯|訳|übersetz|tradu|перев|แปล|अनुवाद|ترجم|dịch"
    r"|terjemah|çevir|tłumacz|vertaal|vertal|översätt|oversæt|overset|käänt|překl|preklad|fordít"
    r"|μεταφρ|תרג|ترجمه|tafsiri|locali[sz]|lokalis|현지화|지역화|本地化|ローカライズ|i18n|gettext"
    r"|literal|wörtlich|buchst|字面|문자 그대로|interpret|통역|口译|dolmetsch|decod|dekod"
    r"|entschlüssel|해독|解码|변환|전환|convert|conversi[oó]n|konvert|umwand|umsetz|umgesetzt"
    r"|转[换化]|轉[換化]|変換|transform|이어[지져진질]|병진|평행 ?이동|平移|平动|\bgear|\bratio\b"
    r"|기어비"
)
_TRANSLATION_TALK = re.compile(rf"(?:{_TRANSLATION})[^\n]{{0,40}}", re.I)
_SPEAKS_OF_TRANSLATING = re.compile(rf"{_TRANSLATING}|{_TRANSLATION}", re.I)
_LANGUAGES = (
    r"한국어|우리말|영어|독일어|중국어|일본어|\b(?:korean|english|german|chinese|japanese"
    r"|(?:koreanisch|deutsch|englisch|chinesisch)(?:e[rs]?)?)\b|(?:简体|繁體)?中文|[汉漢]语|英文"
    r"|英[语語]|德[语語文]|[韩韓][语語文]"
)
#: Labels of a result; a source with a label of this kind has one of them.
_MADE = (
    r"\b(?:output|answer|response|results?|target|final|text|version|ausgabe|antwort|ergebnis"
    r"|ziel(?:text)?|fassung)\b|(?-i:\b(?:KO|EN|DE|ZH)\b)|출력|답변?|정답|응답|결과|최종|输出|答案"
    r"|回答|结果|訳|traduction|traducción|tradução|traduzione|перевод|bản dịch|terjemahan|คำแปล"
    r"|अनुवाद|الترجمة"
)
_WORD = rf"{_TRANSLATION}|{_LANGUAGES}|{_MADE}"
_LABEL = re.compile(
    rf"{_EDGE}(?:(?:the )?(?:{_WORD})(?: ?(?:{_WORD})| ?[로문본판]| (?:in)?to| in| ins| auf| of"
    rf"| al){{0,4}}"
    r"(?: \w{1,12})?)(?:[ *_\"'”）)\]】]{0,5}(?:[：=\n→]|:(?-i:(?![a-z/:])))"
    r"|[*_]{0,2}[）)\]】>][*_]{0,2}\s)",
    re.I,
)
_LABELED = re.compile(
    rf"(?:{_WORD}|{_TRANSLATING}|language|언어|语言|sprache|repl(?:y|ies)|return)[^\n]{{0,40}}"
    r"(?:[:：=→)）\]】>*–—-]|\n)",
    re.I,
)
#: A clause that ends in a colon, and the excuses in a source.
_CLAUSE = re.compile(rf"{_EDGE}[^:：\n]{{1,120}}[:：](?=\s*\S)")
_LEADS = tuple(
    re.compile(pattern, re.I)
    for pattern in (
        _TRANSLATION,
        rf"\b(?:in|into|auf|ins) (?:{_LANGUAGES})|(?:{_LANGUAGES})(?:로| (?:version|fassung|text))"
        rf"|[用成为為](?:{_LANGUAGES})",
        r"\bhere (?:you go|it is|is)\b|\bas follows|\btranslat\w{1,3} (?:(?:in)?to|as)\b|my version"
        r"|(?:text|sentence|passage|phrase) (?:says|means|reads)|would (?:be|read)"
        r"|[다아][음래][과와] 같|이렇[습게]|옮기면|如下|意思是|\bwie folgt\b|\bim folgenden\b"
        r"|\blautet\b",
    )
)
_LEAD_EXCUSES = (
    re.compile(r"[:：\n–—;]|\s-\s"),
    re.compile(rf"{_LANGUAGES}|language|언어|语言|語言|sprache", re.I),
    re.compile(
        r"[:：\n–—;]|\s-\s|follow|below|here|these|folgend|hier|다음|아래|이렇|이런|여기|如下|以下"
        r"|下面|[这這]",
        re.I,
    ),
)
_YES = (
    r"(?:sure|certainly|of course|absolutely|okay|ok|got it|no problem|understood|al(?:l )?right"
    r"|gladly|great|yes|네{1,3}|예|넵|물론(?:입니다|이[죠지]요?)?|알겠(?:습니다|어요)|그럼요"
    r"|당연하죠|좋(?:습니다|아요)|(?:sehr |aber )?gerne?|natürlich|selbstverständlich|(?:na )?klar"
    r"|kein problem|alles klar|verstanden|in ordnung|jawohl|好的?|当然(?:可以)?|當然|没问题|可以的?"
    r"|明白了?|收到|はい|もちろん(?:です)?|承知しました|かしこまりました)"
)
_OPENER = rf"(?:{_YES}[!！,，.。、]+\s*+)?"
#: Assent to the request: a sentence of its own, with what may follow it.
_ASSENT = re.compile(
    rf"{_EDGE}{_YES}(?:[!！.。~]|[,，、 ][^.!?。！？\n]{{0,40}}[.!。！])(?=\s*\S)", re.I
)
_ASSENTING = re.compile(
    r"\b(?:ye[sp]|yeah|ok|okay|sure|all?right|certain|of course|absolut|naturally|obvious"
    r"|understood|got it|no problem|glad|indeed|exactly|ja|klar|natürlich|gern|selbstverst"
    r"|in ordnung)\b|\A\W{0,3}(?:good|great|fine|well|right|clear|gut|genau|sicher|stimmt|verst|是"
    r"|好|对|對|可以|行)|(?<![가-힣])[네예응](?![가-힣])|그래|그렇|물론|알[겠았]|좋|당연|그럼|맞"
    r"|괜찮|확실|当然|當然|没问题|明白|はい|もちろん|承知",
    re.I,
)
#: Statements of a chat model about itself.
_ASIDES = re.compile(
    rf"{_EDGE}(?:(?:as|i['’]m|i am)(?: just| only| merely)? an? (?:ai|(?:large )?language model)\b"
    r"|please provide (?:me with )?(?:the|a) (?:text|source)\b|(?:저는 )?(?:ai|(?:ai "
    r"|대규모 )?언어 ?모델|ai ?모델|인공지능)(?:로서|이므로|이기 때문)|作[为為](?:一个|一個)?(?:ai"
    r"|人工智能|(?:大型?)?[语語]言模型)|aiとして|ai言語モデルとして|als (?:ki|sprachmodell)\b"
    r"|en tant qu['’]ia\b|como (?:modelo|ia)\b)",
    re.I,
)
_OF_MODELS = re.compile(
    r"\bai\b|인공지능|人工知能|人工智能|\b(?:ki|ia|ии)\b|텍스트|본문|文本|テキスト|text|언어 ?모델"
    r"|语言模型|語言模型|language model|sprachmodell",
    re.I,
)


def meta_phrase(src: str, mt: str) -> str | None:
    """Return what is said about the translation or to the client at its start, unless the source
    does. Examples: "Here is the translation:", "번역:", "네, 알겠습니다."."""
    head = src[:_HEAD]
    clause = _CLAUSE.match(mt)
    leads = [clause if clause and phrase.search(clause.group()) else None for phrase in _LEADS]
    for match, excuse in (
        (_LABEL.match(mt), _LABELED),
        *zip(leads, _LEAD_EXCUSES, strict=True),
        (_ASIDES.match(mt), _OF_MODELS),
    ):
        if match and not excuse.search(head):
            return match.group().strip()
    line = mt.lstrip()[:_HEAD].partition("\n")[0]
    if (match := _TRANSLATION_TALK.search(line)) and not _SPEAKS_OF_TRANSLATING.search(src):
        return line[: match.end()]
    match = _ASSENT.match(mt)
    if not match or _ASSENTING.search(src[:80]) or _sentences(mt) <= _sentences(src):
        return None
    return match.group().strip()


def _sentences(text: str) -> int:
    return sum(len(split_sentences(line)) for line in text.split("\n") if line.strip())


# -- in place of it --------------------------------------------------------------------------------

#: Regret, and in this sentence or the next that something cannot be done.
_SORRY = (
    r"(?:(?:i['’]?m|i am|we['’]re|we are) (?:so |very |really |truly )?(?:sorry|afraid)|sorry"
    r"|(?:my |our )?(?:sincere )?apologies"
    r"|i apologi[sz]e)\b[^\n]{0,60}?\bi\b[^\n]{0,20}?(?:can['’]?t|cannot|can not|unable|not able"
    r"|won['’]t|will not|not (?:allowed|permitted|comfortable)|decline|don['’]t|do not"
    r"|couldn['’]t)",
    r"(?:정말 |대단히 )?(?:죄송|미안|송구)(?:합니다|하지만|하오나|스럽지만|하게도|해요|한데"
    r"|하네)[^\n]{0,80}?(?:수(?:가|는|도)? ?없|어렵습|어려울|어려워|불가|못 ?(?:하|합|해|드)"
    r"|지 (?:않|못)|거부|거절)",
    r"(?:도움|도와|번역|답변|답을|요청)[^\n]{0,14}?(?:못|없|않)[^\n]{0,10}?(?:죄송|미안|유감|양해)",
    r"(?:我)?(?:很|非常|十分|实在|實在|真的)?(?:抱歉|对不起|對不起|不好意思)[^\n]{0,40}?(?:无法"
    r"|無法|不能|不可以|没办法|沒辦法|拒[绝絕]|难以|難以|不便)",
    r"(?:大変|誠に|まことに)?(?:申し訳|すみません|すいません|ごめんなさい|恐れ入りますが"
    r"|恐縮ですが)[^\n]{0,60}?(?:できません|出来ません|できない|できかね|しかね|かねます|お手伝い"
    r"|お応え|お答え)",
    r"(?:(?:es )?tut mir (?:sehr |wirklich )?leid|entschuldig(?:ung|e|en sie)|verzeihung"
    r"|ich bedau(?:e)?re)[^\n]{0,80}?(?:\bnicht\b|\bkein|unmöglich|ablehnen|außerstande)",
    r"(?:(?:je suis |toutes mes |je )?(?:vraiment |sincèrement )?(?:désolée?|excuses|regrette"
    r"|m['’]excuse)|pardon)[^\n]{0,60}?(?:\bne (?:peux|puis|suis|saurais)|n['’]ai pas|impossible"
    r"|pas en mesure)",
    r"(?:lo siento|lamento|disculp[ea]|perdón|mis disculpas)[^\n]{0,60}?(?:\bno (?:puedo|podemos"
    r"|me es|es posible|soy|estoy|podré)|imposible)",
    r"(?:desculp[ea]|lamento|sinto muito|peço desculpas?)[^\n]{0,60}?não (?:posso|consigo"
    r"|é possível|sou|estou|podemos)",
    r"(?:mi dispiace|mi scuso|spiacente|scus[ai])[^\n]{0,60}?non (?:posso|sono|è possibile|riesco)",
    r"(?:извини|прости|приношу (?:свои )?извинения|мне (?:очень )?жаль)[^\n]{0,60}?(?:не (?:могу"
    r"|смогу|в состоянии|можем)|невозможно)",
    r"(?:(?:tôi )?(?:rất tiếc|xin lỗi))[^\n]{0,60}?không (?:thể|được)",
    r"(?:mohon )?maaf\b[^\n]{0,60}?(?:tidak|tak) (?:bisa|dapat)",
    r"ขอ(?:โทษ|อภัย)[^\n]{0,60}?ไม่",
    r"(?:أنا )?(?:آسف|عذر|أعتذر|نأسف)[^\n]{0,60}?(?:لا (?:أستطيع|يمكن|أقدر)|غير قادر)",
    r"(?:मुझे )?(?:क्षमा|माफ|खेद)[^\n]{0,60}?(?:नहीं|असमर्थ)",
    r"(?:üzgünüm|özür dilerim|kusura bakma)[^\n]{0,80}?(?:emem|amam|emiyor|amıyor|mümkün değil)",
    r"(?:przepraszam|przykro mi)[^\n]{0,60}?nie (?:mogę|jestem w stanie)",
    r"(?:het spijt me)[^\n]{0,60}?(?:\bniet\b|\bgeen\b)",
)
#: A statement, without regret, that this task cannot be done.
_UNABLE = (
    r"(?:unfortunately,? )?i(?:['’]m| am)? (?:am |was |must )?(?:can['’]?t|cannot|can not|unable to"
    r"|not able to|not permitted to|not allowed to|won['’]t|will not|decline to"
    r"|have to decline)(?: be able)?(?: to)? (?:(?:help|assist)(?: you)? (?:with|in)\b|(?:help"
    r"|assist)(?: you)?[.!]|(?:translate|fulfil+|comply with|process|complete|generate|respond to"
    r"|answer|accommodate|continue with) (?:this|that|your|the|any|such|it)\b|provide (?:this|that"
    r"|a|the|any) (?:translat|service|content|information))",
    r"(?:저는 |유감스럽게도,? |안타깝게도,? )?(?:이|해당|그러한|그런|요청하신|제공하신"
    r"|주신) ?(?:요청|내용|텍스트|문장|질문|글|콘텐츠)[^\n]{0,40}?(?:번역|도와|도움|처리|응답|답변"
    r"|제공|수행)[^\n]{0,20}?(?:수(?:가|는)? ?없|못|어렵|불가|않)",
    r"(?:저는 |유감스럽게도,? |안타깝게도,? )?(?:번역|도움|도와|답변|응답)(?:을|해"
    r"|하)?[^\n]{0,8}?(?:드릴|할|줄) 수(?:가|는)? ?없",
    r"(?:很遗憾[，,]?|[由因][于於為为][^，。\n]{1,16}，|根据[^，。\n]{1,16}，)?我(?:无法|無法"
    r"|不能)(?:帮|幫|協助|协助|提供|翻[译譯]|回答|处理|處理|满足|滿足|完成|执行|執行|回应)",
    r"(?:残念ながら、?)?(?:この|その)?[ごお]?(?:リクエスト|要求|依頼|要望|内容|文章|テキスト"
    r"|質問)[^\n]{0,40}?(?:できません|出来ません|できかね|しかね|かねます)",
    r"(?:leider |hierbei |dabei |damit |hiermit )?(?:ich )?(?:kann|darf|werde"
    r"|möchte)(?: ich)?[^.\n]{0,50}?(?:nicht|kein\w{0,2})[^.\n]{0,30}?(?:helfen|behilflich"
    r"|übersetzen|beantworten|bearbeiten|erfüllen|nachkommen|unterstützen|bereitstellen)",
    r"(?:malheureusement,? )?je (?:ne (?:peux|puis|suis)|refuse)[^.\n]{0,30}?(?:aider|traduire"
    r"|répondre|fournir|satisfaire|traiter|en mesure)",
    r"(?:lamentablemente,? |desafortunadamente,? )?no (?:puedo|soy capaz de"
    r"|me es posible)[^.\n]{0,20}?(?:ayudar|traducir|responder|proporcionar|cumplir|procesar"
    r"|atender|completar)",
    r"(?:infelizmente,? )?não posso[^.\n]{0,20}?(?:ajudar|traduzir|responder|fornecer|atender)",
    r"(?:purtroppo,? )?non posso[^.\n]{0,20}?(?:aiutar|tradurre|rispondere|fornire|soddisfare)",
    r"(?:к сожалению,? )?я не (?:могу|смогу)[^.\n]{0,20}?(?:помочь|перевести|ответить|выполнить)",
)
_REGRETS, _DECLINES = (
    re.compile(rf"{_EDGE}{_OPENER}{_EDGE}(?:{'|'.join(phrases)})", re.I)
    for phrases in (_SORRY, _UNABLE)
)
#: Excuses in a source: regret; or that something cannot be.
_REGRET = re.compile(
    r"\b(?:sorry|afraid|apolog|regret|pardon|excuse|forgive)|죄송|미안|송구|유감|사과|용서|실례"
    r"|사죄|抱歉|对不起|對不起|不好意思|遗憾|遺憾|歉|原谅|原諒|申し訳|すみません|すいません"
    r"|すまない|すまん|ごめん|恐れ入り|恐縮|失礼|悪い|わるい|\bleid\b|entschuldig|verzeih|bedau"
    r"|désol|excus|regret|pardon|navré|siento|lament|disculp|perd[oó]n|desculp|sinto|perdo|dispiac"
    r"|scus|spiacen|извин|прост|жаль|сожал|xin lỗi|tiếc|\bmaaf|ขอโทษ|ขออภัย|เสียใจ|آسف|أسف|عذر|معذر"
    r"|क्षमा|माफ|खेद|üzgün|özür|kusura|pardon|przepraszam|przykro|wybacz|spijt|ledsen|ursäkta"
    r"|förlåt|beklager|undskyld|unnskyld|pahoittelen|anteeksi|omlouv|promiň|îmi pare|scuz|sajnál"
    r"|bocs|elnézést|λυπάμαι|συγγνώμη|вибач|пробач|съжаля|žao|oprosti|samahani|pole|ngiyaxolisa"
    r"|סליח|מצטער|ببخشید|متأسف|معاف|দুঃখিত|ক্ষমা|மன்னி|క్షమించ|ಕ್ಷಮಿಸಿ|ക്ഷമിക്ക|માફ",
    re.I,
)
_NEGATED = re.compile(
    r"\b(?:can['’]?t|cannot|can not|unable|not able|won['’]t|will not|declin|refus|couldn['’]t"
    r"|could not|not (?:allowed|permitted|possible)|impossible|powerless)|수(?:가|는|도|야)? ?없|못"
    r"|불가|없[어다네는을]|않|거절|거부|어렵|无法|無法|不能|没办法|沒辦法|不会|不會|不可|不了|拒"
    r"|できません|できない|出来ない|出来ません|かね|ません|ない|無理|nicht|kein|unmöglich|\bne\b"
    r"|n['’]|\bpas\b|\bno\b|\bn[ãa]o\b|\bnon\b|\bне\b|невозмож|không|tidak|\btak\b|ไม่|لا|لن|لم"
    r"|नहीं|असमर्थ|\bnie\b|\bniet\b|geen|\binte\b|\bikke\b|değil|[ae]m[ıiae]|\bnem\b|\bnu\b|\bδεν\b"
    r"|לא|نمی|না|இல்லை|முடியாது|లేదు|ಇಲ್ಲ|ഇല്ല|નથી|ਨਹੀਂ|नाही|\bei\b|\ben\b|\bsi(?:wezi|yo)",
    re.I,
)


#: A reference to the request: "this request can't be ...", "this content may violate ...".
_REQUEST = re.compile(
    rf"{_EDGE}[^\n]{{0,60}}?(?:"
    r"(?:this|that|your) request (?:can['’]?t|cannot|can not|is not|could not|violates"
    r"|goes against)|(?:이|그|해당|이러한|그러한|그런|이런|요청하신) ?(?:요청|부탁|요구"
    r"|작업)[^\n.]{0,24}?(?:수(?:가|는)? ?없|못|어렵|어려|불가)|(?:[该該此您你]的?"
    r"|[这這]个?個?)(?:请求|請求|要求)[^\n。]{0,16}?(?:无法|無法|不能|不可)|(?:this|that|the"
    r"|your) (?:content|text|request|message|passage) (?:may |might |could |would )?(?:violate"
    r"|go(?:es)? against|breach)|(?:이|해당) ?(?:콘텐츠|내용|텍스트|문장|요청)[^\n.]{0,20}?(?:정책"
    r"|지침|가이드라인)[^\n.]{0,10}?(?:위반|위배|어긋)|(?:[该該此]|[这這][个個段])(?:内容|內容|文字"
    r"|文本)[^\n。]{0,12}?(?:违反|違反|违背)|\b(?:diese[rnm]?|ihre[rnm]?|deine[rnm]?) (?:anfrage"
    r"|bitte|aufforderung)\b[^\n.]{0,24}?\b(?:nicht|kein|unmöglich|ablehnen))",
    re.I,
)
_NOT_SO = re.compile(
    rf"{_NEGATED.pattern}|violat|breach|against|위반|위배|어긋|违反|違反|违背|verst(?:öß|oß|oss)",
    re.I,
)


def refusal(src: str, mt: str) -> str | None:
    """Return the start of a refusal to translate, unless the source has one.
    Examples: "I'm sorry, but I can't help with that", "죄송합니다만, 이 요청은"."""
    for match, excuse in (
        (_REGRETS.match(mt), _REGRET),
        (_DECLINES.match(mt), _NEGATED),
        (_REQUEST.match(mt), _NOT_SO),
    ):
        if match:
            return None if excuse.search(src[:_HEAD]) else match.group().strip()
    return None


# -- after it --------------------------------------------------------------------------------------

#: Start of an addition: on a line of its own, in brackets, after a sentence.
_BEGIN = r"(?:\n[ \t]{0,4}|[(（\[【] ?|[.!?。！？…)”\"」』*][ \t]{0,2})[*_>#(（\[※–—-]{0,4} ?"
_NOTE_LABELS = (
    r"notes?|explanations?|n\.b\.|alternative(?:ly| translations?)|참고(?: ?사항)?|주석|각주|비고"
    r"|설명|注|注意|注释|注釋|备注|備註|说明|說明|註|解释|解釋|注記|備考|補足|解説|hinweise?"
    r"|anmerkung(?:en)?|anm\. d\. üb\w{1,8}\.?|erläuterung(?:en)?|erklärung|remarques?"
    r"|explications?|notas?|explicación|aclaración|observación|observação|explicação"
    r"|note del traduttore|spiegazione|примечани[ея]|пояснени[ея]|หมายเหตุ|ملاحظة|lưu ý|ghi chú"
    r"|catatan|टिप्पणी|नोट"
)
_NOTE = re.compile(rf"{_BEGIN}(?:{_NOTE_LABELS})[*_)）\]】]{{0,3}} ?[:：]", re.I)
#: Excuses in a source for such a label.
_NOTE_WORDS = re.compile(
    r"다른 번역|대체 번역|anm\. d\. üb|\b(?:note|notes|noted|notice|nb|remark|hint|tip|explan"
    r"|explain|caution|warning|attention|footnote|descri|instruct|comment|alternativ|observ|nota)"
    r"|n\.b\.|※|참고|참조|주의|비고|설명|안내|알림|유의|메모|해설|주석|각주|대안|덧붙|注|备|備|说明"
    r"|說明|提示|解释|解釋|註|補足|説明|解説|なお|hinweis|anmerk|beacht|achtung|erläut|erklär"
    r"|bemerk|remarqu|explic|astuce|aviso|aclara|spieg|avvis|примеч|замет|вниман|поясн|объясн"
    r"|หมายเหตุ|ملاحظ|ملحوظ|lưu ý|chú|catatan|टिप्पणी|नोट|ध्यान|\bnot\b|uwaga|opmerking|let op"
    r"|poznámk|megjegyz|huom|обърнете|приміт",
    re.I,
)
#: In brackets: the literal wording of the source, or another wording.
_GLOSS = re.compile(
    r"[(（\[【]\s{0,2}[*_\"'„“]{0,3}(?:literal(?:ly)?\b|lit\.|wörtlich|frei übersetzt|im original"
    r"|original\b|원문|직역|의역|문자 그대로|다른 표현|原文|字面|(?:or|oder|또는|혹은|或者?"
    r"|alternativ\w{0,4}) ?(?:：|:(?![a-z])))",
    re.I,
)
_GLOSSED = re.compile(
    r"literal|original|wörtlich|ursprüng|buchst|원문|원본|원래|본래|원작|문자|리터럴|原|字面|초판",
    re.I,
)
#: Between two wordings: after the end of a sentence.
_BETWEEN = re.compile(
    r"[.!?。！？][\"'”’“]?(?:\s{0,2}(?:또는|혹은|(?-i:or|oder)\b|或者?)|\s{1,2}[/|]\s|\s?[②❷])"
)
_EITHER = re.compile(
    r"\b(?:or|oder|either|else)\b|[/|②❷]|또는|혹은|아니면|거나|이?든지?|이?나 |或|还是|要么"
    r"|alternativ|대신|대안",
    re.I,
)
#: A tail that addresses the reader: more help, changes, further wishes.
_TAIL = re.compile(
    r"[.!?。！？…)”\"」』*\n]\s{0,4}[*_(（]{0,3}(?=[^.!?。！？\n]{0,40}?(?:\blet me know"
    r"|\bfeel free|hope (?:this|that|it) helps|happy to help|just ask|would you like (?:me|any"
    r"|another)|do you want me|shall i|anything else|tell me if|don['’]t hesitate|any questions"
    r"|if you(?:['’]d| would) (?:like|prefer)|if you (?:need|want|have) (?:any|further|more|me to"
    r"|other)|도움이 되|말씀(?:만)? ?해|알려 ?주|물어보|문의|드릴까요|(?:더|다른"
    r"|혹시)[^.\n]{1,20}있(?:을까|으신가|나)요|(?:원하|필요하)시면|언제든지? ?(?:말씀|문의|물어"
    r"|알려)|이상으로|희망합니다|希望(?:[对對]|[这這]|能|以上)|如果?(?:[您还還]|有(?:任何|其他|问题"
    r"|需要))|[请請](?:随时|隨時|告[诉訴]|跟我)|需要我|还需要|您还|祝您|以上(?:就)?是|欢迎(?:随时"
    r"|提)|お役に立て|他に(?:ご|何か)|ご不明な点|何かございましたら|ich hoffe,? (?:das|dies)"
    r"|lass(?:en sie)? (?:es )?mich|falls (?:du|sie) \w{1,12}|wenn (?:du|sie) noch|bei (?:weiteren"
    r"|rückfragen|fragen)|kann ich (?:sonst|dir|ihnen|noch)|soll ich|möchte(?:st du|n sie) (?:noch"
    r"|eine|dass ich)|\bbescheid|melde(?:n sie)? |zur verfügung|n['’]hésitez pas|j['’]espère que"
    r"|no dude[sn]? en|espero que (?:esto|te|le)|не стесняйтесь|надеюсь,? это"
    r"|дайте (?:мне )?знать))[^\n]{1,120}\Z",
    re.I,
)
_CLOSING_WORDS = re.compile(
    r"\b(?:know|question|help|contact|feel free|hesita|tell|hope|anything|need|reach|ask|inform"
    r"|want|like|ping)|알려|연락|문의|말씀|말해|궁금|질문|도움|필요|원하|얘기|이야기해|까요|希望"
    r"|如果|如有|若|需要|需|联系|聯|告诉|告訴|咨询|随时|帮|質問|教え|連絡|必要|役に立|助け|不明"
    r"|お気軽|知らせ|wissen|frage|hilf|hoff|melde|kontakt|bescheid|hésit|aide|espère|besoin"
    r"|question|contact|savoir|dud[ae]|ayud|espero|necesit|pregunt|saber|aiut|spero|domand|ajud"
    r"|знать|вопрос|помо|надеюсь|обращ|свяж|hỏi|giúp|liên hệ|hubungi|bantu|tanya|ถาม|ช่วย|ติดต่อ"
    r"|سؤال|أسئلة|مساعد|प्रश्न|मदद|सवाल|संपर्क|soru|yardım|pytani|pomoc|vraag|vragen|fråg|hjälp"
    r"|hjelp|spørg",
    re.I,
)


def added_note(src: str, mt: str) -> str | None:
    """Return the start of an addition after the translation ("Note: ...", "(직역: ...)", a second
    wording, "Let me know if ..."), unless the source has one; or the last line, if the source has
    fewer lines."""
    for phrase, excuse, searched, count in (
        (_TRANSLATION_TALK, _SPEAKS_OF_TRANSLATING, src, None),
        (_NOTE, _NOTE_WORDS, src, None),
        (_BETWEEN, _EITHER, src, None),
        (_GLOSS, _GLOSSED, src, _brackets),
        (_TAIL, _CLOSING_WORDS, src[-_HEAD // 2 :], _sentences),
    ):
        start = max(0, len(mt) - _HEAD) if phrase is _TAIL else 0
        match = next((m for m in phrase.finditer(mt, start) if _follows_text(mt, m.start())), None)
        if match and not excuse.search(searched) and (count is None or count(mt) > count(src)):
            return match.group().strip()
    return mt.strip().rpartition("\n")[2] if _has_more_lines(src, mt) else None


def _brackets(text: str) -> int:
    return sum(map(text.count, "(（[【"))


def _has_more_lines(src: str, mt: str) -> bool:
    """Return True if a source of one line became more, or one of several has a further
    paragraph."""
    lines = [line.strip() for line in src.strip().split("\n")]
    mt_lines = [line.strip() for line in mt.strip().split("\n")]
    if len(lines) == 1:
        return bool(lines[0]) and len(mt_lines) > 1
    return _paragraphs(mt_lines) > _paragraphs(lines)


def _paragraphs(lines: list[str]) -> int:
    return sum(bool(line) and not before for before, line in zip(["", *lines], lines, strict=False))


def _follows_text(text: str, position: int) -> bool:
    return any(char.isalnum() for char in text[:position])
