"""What a chat model says about its work, and no translation does: at its start, at its end, or in
place of it.

Each function is pure and gives the text that it found, or None. What the source says, too, in any
of the languages known here, its translation may say: a talk may well begin with "I'm sorry, but I
can't".
"""

from __future__ import annotations

import re

_EDGE = r"[\s\"'“”‘’「『\[【*_#>-]{0,9}+"
_NAME = r"[^\s:：\n]{2,20}"

# -- at the start ----------------------------------------------------------------------------------

_OPENER = (
    r"(?:(?:sure|certainly|of course|okay|ok|absolutely|네|물론입니다|물론이죠|알겠습니다)"
    r"[!,.]+\s*+|"
    r"(?:好的|当然|當然)[!！,，。]+\s*+|(?:はい|もちろん(?:です)?|承知しました|かしこまりました)"
    r"[!！、。,]+\s*+)?"
)
#: A label: nothing but the word, a language beside it, then a colon or a line of its own.
_LABELS = (
    rf"(?:(?:the |{_NAME} )?translat(?:ion|ed text)(?: (?:in)?to {_NAME})?)",
    rf"(?:(?:{_NAME} ?)?번역(?:문|본|\s?결과)?)",
    r"(?:[\w]{0,4}(?:翻译|翻譯|译文|譯文)(?:结果|結果|如下)?)",
    r"(?:[\w]{0,5}(?:翻訳|和訳|訳文|訳)(?:結果|文)?)",
    rf"(?:(?:{_NAME}e )?übersetzung|traduction(?: {_NAME})?|traducción(?: al {_NAME})?)",
    rf"(?:tradução|traduzione|перевод(?: на {_NAME})?|bản dịch|terjemahan|คำแปล|अनुवाद|الترجمة)",
)
#: The start of a sentence about the translation; it runs to the end of its sentence or line.
_SENTENCES = (
    r"(?:here(?:['’]s| is| are)\s[^:\n.]{0,40}?translat(?:ion|ed)|"
    r"below is\s[^:\n.]{0,40}?translation|"
    r"the (?:translation|translated text) (?:of[^:\n]{0,60} )?(?:is(?: as follows)?|follows))",
    r"(?:다음은|아래는|여기)[^:：\n]{0,40}?번역(?:문|본|\s?결과)?(?:입니다|이에요|예요|이다)",
    r"(?:以下是|下面是|这是|這是)[^:：\n]{0,30}?(?:翻译|翻譯|译文|譯文)|(?:翻译|翻譯)如下",
    r"(?:以下は|以下が|こちらが|これが)[^:：\n]{0,30}?(?:翻訳|和訳|訳文|訳)(?:です|になります"
    r"|となります)",
    r"hier ist (?:die|eine|deine|ihre)[^:\n.]{0,20} übersetzung|voici (?:la|une) traduction|"
    r"(?:aquí|esta) (?:está|tienes|es) la traducción|aqui está a tradução|ecco la traduzione|"
    r"вот (?:ваш )?перевод",
)
_META = re.compile(
    rf"{_EDGE}{_OPENER}{_EDGE}(?:(?:{'|'.join(_LABELS)})[ *_\"'”）)\]】]*(?:[:：]|\n)"
    rf"|(?:{'|'.join(_SENTENCES)})[^\n:：.。]{{0,60}}(?:[:：.。!]|\n|\Z))",
    re.I,
)
#: What a chat model says of itself: found at the start, it needs no colon.
_ASIDES = re.compile(
    rf"{_EDGE}{_OPENER}{_EDGE}(?:"
    r"(?:i(?:['’]ll| will| can| have|['’]ve) translated?\b|(?:as|i['’]m|i am)(?: just| only"
    r"| merely)? an? (?:ai|(?:large )?language model)\b|let me translate\b|"
    r"please provide (?:me with )?(?:the|a) (?:text|source)\b)|"
    r"(?:제가 번역(?:해 드리|하겠|한)|번역해 드리겠습니다|번역하겠습니다"
    r"|(?:저는 )?(?:ai|(?:ai |대규모 )?언어 ?모델|ai ?모델|인공지능)(?:로서|이므로|이기 때문))|"
    r"(?:我(?:将|会|來|来)(?:为您|为你)?翻[译譯]|作[为為](?:一个|一個)?(?:ai|人工智能"
    r"|(?:大型?)?[语語]言模型))|(?:翻訳します[。:：\n]|翻訳いたします|aiとして|ai言語モデルとして)|"
    r"(?:ich (?:werde|habe) [^.\n]{0,30}übersetz|als (?:ki|sprachmodell)\b|en tant qu['’]ia\b"
    r"|como (?:modelo"
    r"|ia)\b))",
    re.I,
)
#: A source that has one of these may be translated by such an aside.
_TRANSLATING = (
    r"translat|번역|옮기|옮긴|옮겼|翻|译|譯|訳|übersetz|tradu|перев|แปล|अनुवाद|ترجم|dịch|terjemah"
    r"|çevir|tłumacz|vertaal|vertal|översätt|oversæt|overset|käänt|překl|preklad|fordít|traduc"
    r"|μεταφρ|תרג|ترجمه|tafsiri"
)
_OF_TRANSLATING = re.compile(
    rf"{_TRANSLATING}|\bai\b|인공지능|人工知能|人工智能|\b(?:ki|ia|ии)\b|텍스트|본문|文本"
    r"|テキスト|text|언어 ?모델|语言模型|語言模型|language model|sprachmodell",
    re.I,
)


def meta_phrase(src: str, mt: str) -> str | None:
    """What is said about the translation at its start ("Here is the translation:", "번역:").

    English, Korean, Chinese, Japanese, German and the labels of some others.
    """
    found = _META.match(mt)
    if found:
        return None if _META.match(src) else found.group().strip()
    found = _ASIDES.match(mt)
    return found.group().strip() if found and not _OF_TRANSLATING.search(src[:_HEAD]) else None


# -- in place of it --------------------------------------------------------------------------------

#: Characters of a source that its translation's start may come from.
_HEAD = 300
#: Regret, and within the sentence or the next that something cannot be done.
_SORRY = (
    r"(?:(?:i['’]?m|i am|we['’]re|we are) (?:so |very |really |truly )?(?:sorry|afraid)|sorry|"
    r"(?:my |our )?(?:sincere )?apologies|i apologi[sz]e)\b[^\n]{0,60}?\bi\b[^\n]{0,20}?"
    r"(?:can['’]?t|cannot|can not|unable|not able|won['’]t|will not|not (?:allowed|permitted"
    r"|comfortable)|"
    r"decline|don['’]t|do not|couldn['’]t)",
    r"(?:정말 |대단히 )?(?:죄송|미안|송구)(?:합니다|하지만|하오나|스럽지만|하게도|해요|한데"
    r"|하네)[^\n]{0,80}?"
    r"(?:수(?:가|는|도)? ?없|어렵습|어려울|어려워|불가|못 ?(?:하|합|해|드)|지 (?:않|못)|거부|거절)",
    r"(?:도움|도와|번역|답변|답을|요청)[^\n]{0,14}?(?:못|없|않)[^\n]{0,10}?(?:죄송|미안|유감|양해)",
    r"(?:我)?(?:很|非常|十分|实在|實在|真的)?(?:抱歉|对不起|對不起|不好意思)[^\n]{0,40}?"
    r"(?:无法|無法|不能|不可以|没办法|沒辦法|拒[绝絕]|难以|難以|不便)",
    r"(?:大変|誠に|まことに)?(?:申し訳|すみません|すいません|ごめんなさい|恐れ入りますが"
    r"|恐縮ですが)"
    r"[^\n]{0,60}?(?:できません|出来ません|できない|できかね|しかね|かねます|お手伝い|お応え"
    r"|お答え)",
    r"(?:(?:es )?tut mir (?:sehr |wirklich )?leid|entschuldig(?:ung|e|en sie)|verzeihung|"
    r"ich bedau(?:e)?re)[^\n]{0,80}?(?:\bnicht\b|\bkein|unmöglich|ablehnen|außerstande)",
    r"(?:(?:je suis |toutes mes |je )?(?:vraiment |sincèrement )?(?:désolée?|excuses|regrette"
    r"|m['’]excuse)|"
    r"pardon)[^\n]{0,60}?(?:\bne (?:peux|puis|suis|saurais)|n['’]ai pas|impossible|pas en mesure)",
    r"(?:lo siento|lamento|disculp[ea]|perdón|mis disculpas)[^\n]{0,60}?"
    r"(?:\bno (?:puedo|podemos|me es|es posible|soy|estoy|podré)|imposible)",
    r"(?:desculp[ea]|lamento|sinto muito|peço desculpas?)[^\n]{0,60}?"
    r"não (?:posso|consigo|é possível|sou|estou|podemos)",
    r"(?:mi dispiace|mi scuso|spiacente|scus[ai])[^\n]{0,60}?non (?:posso|sono|è possibile|riesco)",
    r"(?:извини|прости|приношу (?:свои )?извинения|мне (?:очень )?жаль)[^\n]{0,60}?"
    r"(?:не (?:могу|смогу|в состоянии|можем)|невозможно)",
    r"(?:(?:tôi )?(?:rất tiếc|xin lỗi))[^\n]{0,60}?không (?:thể|được)",
    r"(?:mohon )?maaf\b[^\n]{0,60}?(?:tidak|tak) (?:bisa|dapat)",
    r"ขอ(?:โทษ|อภัย)[^\n]{0,60}?ไม่",
    r"(?:أنا )?(?:آسف|عذر|أعتذر|نأسف)[^\n]{0,60}?(?:لا (?:أستطيع|يمكن|أقدر)|غير قادر)",
    r"(?:मुझे )?(?:क्षमा|माफ|खेद)[^\n]{0,60}?(?:नहीं|असमर्थ)",
    r"(?:üzgünüm|özür dilerim|kusura bakma)[^\n]{0,80}?(?:emem|amam|emiyor|amıyor|mümkün değil)",
    r"(?:przepraszam|przykro mi)[^\n]{0,60}?nie (?:mogę|jestem w stanie)",
    r"(?:het spijt me)[^\n]{0,60}?(?:\bniet\b|\bgeen\b)",
)
#: No regret, but that *this task* cannot be done.
_UNABLE = (
    r"(?:unfortunately,? )?i(?:['’]m| am)? (?:am |was |must )?"
    r"(?:can['’]?t|cannot|can not|unable to|not able to|not permitted to|not allowed to|won['’]t"
    r"|will not|decline to|have to decline)(?: be able)?(?: to)? (?:"
    r"(?:help|assist)(?: you)? (?:with|in)\b|(?:help|assist)(?: you)?[.!]|"
    r"(?:translate|fulfil+|comply with|process|complete|generate|respond to|answer|accommodate"
    r"|continue with)"
    r" (?:this|that|your|the|any|such|it)\b|provide (?:this|that|a|the|any) (?:translat|service"
    r"|content|information))",
    r"(?:저는 |유감스럽게도,? |안타깝게도,? )?(?:이|해당|그러한|그런|요청하신|제공하신"
    r"|주신) ?(?:요청|내용|텍스트|문장|질문|글|콘텐츠)"
    r"[^\n]{0,40}?(?:번역|도와|도움|처리|응답|답변|제공|수행)[^\n]{0,20}?(?:수(?:가|는)? ?없|못"
    r"|어렵|불가|않)",
    r"(?:저는 |유감스럽게도,? |안타깝게도,? )?(?:번역|도움|도와|답변|응답)(?:을|해"
    r"|하)?[^\n]{0,8}?(?:드릴|할|줄) 수(?:가|는)? ?없",
    r"(?:很遗憾[，,]?|[由因][于於為为][^，。\n]{1,16}，|根据[^，。\n]{1,16}，)?我(?:无法|無法"
    r"|不能)(?:帮|幫|協助|协助|提供|翻[译譯]|回答|处理|處理|满足"
    r"|滿足|完成|执行|執行|回应)",
    r"(?:残念ながら、?)?(?:この|その)?[ごお]?(?:リクエスト|要求|依頼|要望|内容|文章|テキスト|質問)"
    r"[^\n]{0,40}?(?:できません|出来ません|できかね|しかね|かねます)",
    r"(?:leider |hierbei |dabei |damit |hiermit )?(?:ich )?(?:kann|darf|werde"
    r"|möchte)(?: ich)?[^.\n]{0,50}?(?:nicht|kein\w{0,2})[^.\n]{0,30}?"
    r"(?:helfen|behilflich|übersetzen|beantworten|bearbeiten|erfüllen|nachkommen|unterstützen"
    r"|bereitstellen)",
    r"(?:malheureusement,? )?je (?:ne (?:peux|puis|suis)|refuse)[^.\n]{0,30}?"
    r"(?:aider|traduire|répondre|fournir|satisfaire|traiter|en mesure)",
    r"(?:lamentablemente,? |desafortunadamente,? )?no (?:puedo|soy capaz de"
    r"|me es posible)[^.\n]{0,20}?"
    r"(?:ayudar|traducir|responder|proporcionar|cumplir|procesar|atender|completar)",
    r"(?:infelizmente,? )?não posso[^.\n]{0,20}?(?:ajudar|traduzir|responder|fornecer|atender)",
    r"(?:purtroppo,? )?non posso[^.\n]{0,20}?(?:aiutar|tradurre|rispondere|fornire|soddisfare)",
    r"(?:к сожалению,? )?я не (?:могу|смогу)[^.\n]{0,20}?(?:помочь|перевести|ответить|выполнить)",
)
_REGRETS, _DECLINES = (
    re.compile(rf"{_EDGE}{_OPENER}{_EDGE}(?:{'|'.join(some)})", re.I) for some in (_SORRY, _UNABLE)
)
#: What a source says where its translation may truly begin so: regret; or that something cannot be.
_REGRET = re.compile(
    r"\b(?:sorry|afraid|apolog|regret|pardon|excuse|forgive)|죄송|미안|송구|유감|사과|용서|실례"
    r"|사죄"
    r"|抱歉|对不起|對不起|不好意思|遗憾|遺憾|歉|原谅|原諒|申し訳|すみません|すいません|すまない"
    r"|すまん|ごめん"
    r"|恐れ入り|恐縮|失礼|悪い|わるい|\bleid\b|entschuldig|verzeih|bedau|désol|excus|regret|pardon"
    r"|navré"
    r"|siento|lament|disculp|perd[oó]n|desculp|sinto|perdo|dispiac|scus|spiacen|извин|прост|жаль"
    r"|сожал"
    r"|xin lỗi|tiếc|\bmaaf|ขอโทษ|ขออภัย|เสียใจ|آسف|أسف|عذر|معذر|क्षमा|माफ|खेद|üzgün|özür|kusura"
    r"|pardon|przepraszam|przykro|wybacz|spijt|ledsen|ursäkta|förlåt|beklager|undskyld|unnskyld"
    r"|pahoittelen|anteeksi"
    r"|omlouv|promiň|îmi pare|scuz|sajnál|bocs|elnézést|λυπάμαι|συγγνώμη|вибач|пробач|съжаля|žao"
    r"|oprosti"
    r"|samahani|pole|ngiyaxolisa|סליח|מצטער|ببخشید|متأسف|معاف|দুঃখিত|ক্ষমা|மன்னி|క్షమించ|ಕ್ಷಮಿಸಿ"
    r"|ക്ഷമിക്ക|માફ",
    re.I,
)
_NEGATED = re.compile(
    r"\b(?:can['’]?t|cannot|can not|unable|not able|won['’]t|will not|declin|refus|couldn['’]t"
    r"|could not"
    r"|not (?:allowed|permitted|possible)|impossible|powerless)|수(?:가|는|도|야)? ?없|못|불가"
    r"|없[어다네는을]|않|거절|거부|어렵"
    r"|无法|無法|不能|没办法|沒辦法|不会|不會|不可|不了|拒|できません|できない|出来ない|出来ません"
    r"|かね|ません|ない|無理"
    r"|nicht|kein|unmöglich|\bne\b|n['’]|\bpas\b|\bno\b|\bn[ãa]o\b|\bnon\b|\bне\b|невозмож|không"
    r"|tidak|\btak\b"
    r"|ไม่|لا|لن|لم|नहीं|असमर्थ|\bnie\b|\bniet\b|geen|\binte\b|\bikke\b|değil|[ae]m[ıiae]|\bnem\b"
    r"|\bnu\b|\bδεν\b"
    r"|לא|نمی|না|இல்லை|முடியாது|లేదు|ಇಲ್ಲ|ഇല്ല|નથી|ਨਹੀਂ|नाही|\bei\b|\ben\b|\bsi(?:wezi|yo)",
    re.I,
)


#: Words of the task, and what denies it or asks for its text, within one sentence in either order:
#: "I won't be translating this", "번역할 텍스트를 입력해 주세요", "ich bin nicht in der Lage, es
#: zu übersetzen". A translation has such words from its source, but for idioms ("does not translate
#: into", "ne se traduit pas par"), which are left out.
_WITHIN = r"[^.!?。！？\n]{0,60}?"
_ABOUT_THE_TASK = (
    (
        r"\btranslat(?:e|ed|es|ing|ions?)\b(?! (?:in)?to\b)",
        r"\b(?:can['’]?t|cannot|can not|couldn['’]t|unable|not (?:able|allowed|permitted|possible"
        r"|comfortable|appropriate|provided|going to)|won['’]t|will not|do(?:es)?(?: not|n['’]t)"
        r"|declin|refus|refrain|violat\w+|against (?:my|our|the)? ?(?:policy|guidelines)|policy"
        r"|guidelines|outside|no text|missing|nothing to|unavailable|not available"
        r"|please (?:provide|share|enter|paste|send|give|supply)"
        r"|(?:provide|share|paste|send) (?:me )?(?:with )?(?:the|your|a)\b)",
    ),
    (
        r"번역(?!되)",
        r"수(?:가|는|도)? ?없|못|불가|않(?:습|아|겠|는|았)|어렵|어려|거절|거부|위배|위반|삼가"
        r"|(?:입력|제공|제시|공유|전달)해 ?주|보내 ?주|알려 ?주",
    ),
    (
        r"翻[译譯]",
        r"[无無没沒]法|没有|沒有|不予|不能|不可|不会|不會|不便|拒[绝絕]|恕|未提供|[请請](?:您"
        r"|先)?(?:提供|输入|輸入"
        r"|给出|給出|发送|發送)",
    ),
    (
        r"翻訳",
        r"できません|出来ません|できない|できかね|しかね|かねます|控え|(?:入力|提供|提示|送信"
        r"|共有)して",
    ),
    (
        r"(?<!in Worte )(?<!in Taten )(?<!in die Praxis )übersetz(?!ung)",
        r"\b(?:nicht|kein(?:e[nrms]?)?|unmöglich|ablehnen|verweiger\w*|verstößt|"
        r"bitte (?:geben|gib|senden|sende|teilen|stellen|fügen))\b",
    ),
    (  # the noun is a gear ratio, too
        r"Übersetzung",
        r"\b(?:(?:nicht|kaum) (?:möglich|verfügbar|erlaubt|zulässig)|unmöglich|ablehnen"
        r"|verweiger\w*|verstößt|(?:nicht|keine) (?:an|bereit|zur Verfügung|liefern|leisten)\w*"
        r"|bitte (?:geben|gib|senden|sende|teilen|stellen|fügen))\b",
    ),
    (  # "se traduit par", "se traduce en": has as its result
        r"(?<!\bse )\btradui[rt]|\btraduction",
        r"\b(?:ne|n['’]|pas|impossible|veuillez (?:fournir|saisir|indiquer))\b",
    ),
    (
        r"(?<!\bse )\btraduc",
        r"\b(?:no (?:puedo|podemos|es posible|se puede)|imposible|proporcion[ea])",
    ),
)
_TASK = re.compile(
    "|".join(
        rf"(?:{one}){_WITHIN}(?:{two})"
        for task, denied in _ABOUT_THE_TASK
        for one, two in ((task, denied), (denied, task))
    ),
    re.I,
)
#: What was asked for, pointed at: "this request can't be ...", "this content may violate ...".
_REQUEST = re.compile(
    rf"{_EDGE}[^\n]{{0,60}}?(?:"
    r"(?:this|that|your) request (?:can['’]?t|cannot|can not|is not|could not|violates"
    r"|goes against)"
    r"|(?:이|그|해당|이러한|그러한|그런|이런|요청하신) ?(?:요청|부탁|요구|작업)[^\n.]{0,24}?"
    r"(?:수(?:가|는)? ?없|못|어렵|어려|불가)"
    r"|(?:[该該此您你]的?|[这這]个?個?)(?:请求|請求|要求)[^\n。]{0,16}?(?:无法|無法|不能|不可)"
    r"|(?:this|that|the|your) (?:content|text|request|message|passage) (?:may |might |could "
    r"|would )?(?:violate|go(?:es)? against|breach)"
    r"|(?:이|해당) ?(?:콘텐츠|내용|텍스트|문장|요청)[^\n.]{0,20}?(?:정책|지침"
    r"|가이드라인)[^\n.]{0,10}?(?:위반|위배|어긋)"
    r"|(?:[该該此]|[这這][个個段])(?:内容|內容|文字|文本)[^\n。]{0,12}?(?:违反|違反|违背)"
    r"|\b(?:diese[rnm]?|ihre[rnm]?|deine[rnm]?) (?:anfrage|bitte|aufforderung)\b[^\n.]{0,24}?"
    r"\b(?:nicht|kein|unmöglich|ablehnen)"
    r")",
    re.I,
)
_NOT_SO = re.compile(
    rf"{_NEGATED.pattern}|violat|breach|against|위반|위배|어긋|违反|違反|违背|verst(?:öß|oß"
    rf"|oss)",
    re.I,
)
_OF_THE_TASK = re.compile(
    rf"{_TRANSLATING}|locali[sz]|lokalis|현지화|지역화|本地化|ローカライズ|변환|전환|convert|konvert|umwand|转换|轉換|変換|conver[st]",
    re.I,
)


def refusal(src: str, mt: str) -> str | None:
    """What a model begins with that will not translate ("I'm sorry, but I can't help with that",
    "죄송합니다만, 이 요청은"), or says in its first sentences of the task ("번역할 텍스트를 입력해
    주세요"), where the source says nothing like it."""
    for pattern, excuse in ((_REGRETS, _REGRET), (_DECLINES, _NEGATED), (_REQUEST, _NOT_SO)):
        if found := pattern.match(mt):
            return None if excuse.search(src[:_HEAD]) else found.group().strip()
    found = _TASK.search(mt[:_HEAD])
    return found.group().strip() if found and not _OF_THE_TASK.search(src) else None


# -- after it --------------------------------------------------------------------------------------

#: Where what is added begins: on a line of its own, in brackets, after a sentence.
_BEGIN = r"(?:\n[ \t]{0,4}|[(（\[【] ?|[.!?。！？…)”\"」』*][ \t]{0,2})[*_>#(（\[※–—-]{0,4} ?"
_NOTE_LABELS = (
    r"(?:translator(?:['’]s)? |translation )?notes?|explanations?|n\.b\.|alternative(?:ly"
    r"| translations?)"
    r"|(?:번역 )?참고(?: ?사항)?|(?:다른|대체|또 다른) 번역(?:문|안)?|역주|주석|각주|비고"
    r"|번역 ?(?:노트|참고|메모|설명)|설명|역자 ?주|注|注意|注释|注釋|备注|備註|说明|說明"
    r"|译注|譯註|译者注|註|解释|解釋|訳注|訳者注|注記|備考|補足|解説|hinweise?|anmerkung(?:en)?"
    r"|anm\. d\. üb\w{1,8}\.?|erläuterung(?:en)?"
    r"|erklärung|remarques?|explications?|notas?|explicación|aclaración|observación|observação"
    r"|explicação"
    r"|note del traduttore|spiegazione|примечани[ея]|пояснени[ея]|หมายเหตุ|ملاحظة|lưu ý|ghi chú"
    r"|catatan|टिप्पणी|नोट"
)
_NOTE = re.compile(rf"{_BEGIN}(?:{_NOTE_LABELS})[*_)）\]】]{{0,3}} ?[:：]", re.I)
#: Words of a source whose translation may well have such a label.
_NOTE_WORDS = re.compile(
    r"다른 번역|대체 번역|anm\. d\. üb|\b(?:note|notes|noted|notice|nb|remark|hint|tip|explan"
    r"|explain|caution|warning|attention|footnote|descri"
    r"|instruct|comment|alternativ|observ|nota)|n\.b\.|※|참고|참조|주의|비고|설명|안내|알림|유의"
    r"|메모|해설|주석|역주|각주|대안|덧붙"
    r"|注|备|備|说明|說明|提示|解释|解釋|註|補足|説明|解説|なお|hinweis|anmerk|beacht|achtung"
    r"|erläut|erklär|bemerk"
    r"|remarqu|explic|astuce|aviso|aclara|spieg|avvis|примеч|замет|вниман|поясн|объясн|หมายเหตุ"
    r"|ملاحظ|ملحوظ|lưu ý"
    r"|chú|catatan|टिप्पणी|नोट|ध्यान|\bnot\b|uwaga|opmerking|let op|poznámk|megjegyz|huom|обърнете"
    r"|приміт",
    re.I,
)
#: What a chat ends with, and what it says of its own translation.
_CLOSINGS = (
    r"(?:please )?(?:let me know|feel free to (?:ask|reach|let)|don['’]t hesitate to)\b"
    r"|i hope (?:this|that) helps"
    r"|(?:is|if) there(?:['’]s| is)? anything else|if you (?:need|have|would like|['’]d like"
    r"|want) (?:any |further |more |me to |other )[^.\n]{0,24}?(?:question|help|assist|chang"
    r"|clarif|adjust|revis|modif|translat)"
    r"|(?:추가|더)(?:로|적으로)? ?(?:궁금|필요|도움|질문|수정)[^\n]{0,30}?(?:말씀|알려|문의|질문)"
    r"|도움이 되(?:었기를|셨기를|길|었으면)"
    r"|(?:다른|추가) (?:질문|요청|문의)[^\n]{0,20}?있으시면|(?:필요하시면"
    r"|원하시면)[^\n]{0,20}?(?:말씀|알려)"
    r"|希望(?:这|這|以上|对您|對您|能)[^\n]{0,12}?(?:帮助|幫助)|如果?(?:您|你)?(?:有|需|还有"
    r"|還有)[^\n]{0,16}?(?:请|請|随时|隨時|告诉|告訴)"
    r"|(?:お役に立て|他に(?:ご|何か)(?:質問|不明|お手伝い)|ご不明な点|何かございましたら)"
    r"|(?:lass(?:en sie)? (?:es )?mich wissen|lass(?:en sie)? es mich wissen|ich hoffe,? (?:das"
    r"|dies) hilft)|(?:n['’]hésitez pas|j['’]espère que (?:cela|ça|cette))|(?:no dude[sn]? en"
    r"|espero que (?:esto|te|le) )|(?:не стесняйтесь|надеюсь,? это|дайте (?:мне )?знать)"
)
#: After these the source is asked whether it speaks of translating.
_OWN_WORK = (
    r"(?:this|the|my|above) translation (?:\w{1,12} ){0,2}(?:keeps?|kept|preserves?|captures?"
    r"|conveys?|maintains?|reflects?"
    r"|aims?|uses?|follows|adheres)\b|i(?:['’]ve| have)? (?:translated|rendered|kept the"
    r"|preserved the|maintained the)\b|note that (?:this|the|i) (?:\w{1,12} ){0,5}?translat"
    r"|(?:참고로,? )?(?:위|이|본|해당|상기) 번역(?:은|문은|에서는|본은)|(?:원문의"
    r"|원문을)[^\n]{0,30}?번역(?:했|하였|하려)"
    r"|(?:以上是|上述|此|该|該|这个|這個)(?:[^\n]{0,6}?)(?:翻译|翻譯|译文|譯文)|(?:以上が|上記の"
    r"|この)(?:翻訳|訳)(?:は|です|では)"
    r"|(?:diese|die obige) übersetzung|cette traduction|esta traducción|questa traduzione"
    r"|esta tradução"
)
_ADDED = tuple(re.compile(rf"{_BEGIN}(?:{some})", re.I) for some in (_CLOSINGS, _OWN_WORK))
_CLOSING_WORDS = re.compile(
    r"\b(?:know|question|help|contact|feel free|hesita|tell|hope|anything|need|reach|ask|inform"
    r"|want|like|ping)"
    r"|알려|연락|문의|말씀|말해|궁금|질문|도움|필요|원하|얘기|이야기해|希望|如果|如有|若|需要|需"
    r"|联系|聯|告诉|告訴|咨询|随时|帮"
    r"|質問|教え|連絡|必要|役に立|助け|不明|お気軽|知らせ|wissen|frage|hilf|hoff|melde|kontakt"
    r"|bescheid|hésit|aide"
    r"|espère|besoin|question|contact|savoir|dud[ae]|ayud|espero|necesit|pregunt|saber|aiut|spero"
    r"|domand|ajud"
    r"|знать|вопрос|помо|надеюсь|обращ|свяж|hỏi|giúp|liên hệ|hubungi|bantu|tanya|ถาม|ช่วย|ติดต่อ"
    r"|سؤال|أسئلة|مساعد"
    r"|प्रश्न|मदद|सवाल|संपर्क|soru|yardım|pytani|pomoc|vraag|vragen|fråg|hjälp|hjelp|spørg",
    re.I,
)


def added_note(src: str, mt: str) -> str | None:
    """The start of what stands behind the translation and is none ("Note: ...", "(참고: ...)",
    "Let me know if ..."), where the source has nothing like it."""
    for pattern, excuse in (
        (_NOTE, _NOTE_WORDS),
        (_ADDED[0], _CLOSING_WORDS),
        (_ADDED[1], _OF_TRANSLATING),
    ):
        found = next((m for m in pattern.finditer(mt) if _follows_text(mt, m.start())), None)
        if found and not excuse.search(src):
            return found.group().strip()
    return None


def _follows_text(text: str, place: int) -> bool:
    return any(char.isalnum() for char in text[:place])
