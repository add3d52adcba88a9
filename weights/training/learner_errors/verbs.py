"""Tenses, forms after other verbs, questions, negation and the order of words."""

from .tables import Rule, Table

TENSE = Table(
    "A verb's tense is wrong beside a word that determines it.",
    r"""
(when|until|till|before|after|as soon as|once|if|unless) (I|you|we|they) BASE => \1 \2 will \3
(when|until|till|before|after|as soon as|once|if|unless) (THIRDSUBJ) THIRD => \1 \2 will <3 BASE>
(when|until|after|as soon as|if) (it's|it is) => \1 it will be
""",
    needs="will|'ll|won't|going to|can|please|don't|tell|call|wait",
)

WOULD = Table(
    "The if-clause of an unreal condition has `would`, or the other clause lacks it.",
    r"""
if SUBJ had PART => if \1 would have \2
if SUBJ were => if \1 would be / if \1 will be
if SUBJ PAST => if \1 would <2 BASE> / if \1 will <2 BASE>
if SUBJ had => if \1 would have
if SUBJ could => if \1 would can / if \1 will can
would have PART => would <1 BASE> / had <1 PART>
(wish) SUBJ (had|knew|were|could) => \1 \2 would \3 / \1 that \2 would \3
""",
    needs="if|wish",
)

SINCE = Table(
    "The present, or the wrong word, stands with a time that began in the past.",
    r"""
SUBJ( have|'ve) (\w+ )?been ING => \1 am\3 \4 / \1 \3<4 BASE>
(he|she|it|Tom|Mary)( has|'s) been ING => \1 is \3 / \1 <3 THIRD>
(I|you|we|they)( have|'ve) PART => \1 <3 BASE>
(he|she|it|Tom|Mary)( has|'s) PART => \1 <3 THIRD>
for (NUM|a|a long|three|the past few|the last few|a few) (SPAN|time|week|month|year|while|while now) => since \1 \2 / during \1 \2
since (yesterday|Monday|last \w+|\w+day|1\d\d\d|20\d\d|\d:\d\d) => from \1 / for \1
since (I|he|she|we) (was|were) => since that \1 \2 / from \1 \2
""",
    needs="since|for .*(minutes|hours|days|weeks|months|years|time|while)",
)

PAST = Table(
    "A finished past has the present perfect or the present.",
    r"""
(I|you|we|they) PAST => \1 have <2 PART> / \1 have <2 PAST> / \1 <2 BASE> / \1 was <2 BASE> / \1 had <2 PART>
(he|she|it|Tom|Mary) PAST => \1 has <2 PART> / \1 has <2 PAST> / \1 <2 BASE> / \1 <2 THIRD>
(we|they|you) were => \1 was / \1 have been
(I|he|she|it|Tom|Mary) was => \1 were / \1 is been
did SUBJ BASE => did \1 <2 PAST> / have \1 <2 PART>
(didn't|did not) BASE => \1 <2 PAST> / don't <2 BASE> / haven't <2 PART>
""",
    needs="yesterday|last (night|week|month|year|summer|winter|Monday|Friday|Sunday)|ago|in (1\\d\\d\\d|20\\d\\d)|when I was|when he was|when she was|this morning",
)

PERFECT = Table(
    "A verb after have, be or a modal has a form that does not exist there.",
    r"""
(have|has|had|haven't|hasn't|hadn't|I've|we've|you've|they've) PART => \1 <2 PAST> / \1 <2 BASE> / \1 to <2 BASE>
(have|has|I've|we've|you've|they've) (never|ever|already|just|always) PART => \1 \2 <3 PAST> / \1 \2 <3 BASE>
(was|were|been|be|is|are) PART by => \1 <2 PAST> by / \1 <2 BASE> by
(was|were|been|be|being) PART => \1 <2 PAST>
(is|are|was|were|I'm|he's|she's|they're|we're|you're) ING => \1 <2 BASE> / \1 to <2 BASE>
(I'm|he's|she's|they're|we're|you're) ING => \1 <2 BASE>
(I|we|they|you)('m|'re) ING => \1 <3 ING>
(can|can't|could|must|should|may|might|will|won't|would) BASE => \1 to <2 BASE> / \1 <2 ING> / \1 <2 PAST>
(will|'ll|must|should|can) be => \1 to be / \1 is / \1 being
(had better|would rather|'d rather|'d better) BASE => \1 to <2 BASE> / \1 <2 ING>
used to BASE => was used to <1 BASE> / use to <1 BASE> / used <1 BASE> / used to <1 ING>
I BASE => I am <1 BASE>
(we|you|they) (want|need|know|like|live|think|believe|understand|love|have) => \1 are \2
""",
)

AGREEMENT = Table(
    "A verb does not agree with its subject.",
    r"""
(THIRDSUBJ|everyone|nobody|this|that) THIRD => \1 <2 BASE>
POSS (FAMILY) THIRD => \1 \2 <3 BASE>
(the|this|that|my|your|his|her|our) (dog|cat|train|bus|shop|store|meeting|baby|company|museum|doctor|man|woman|boy|girl|child|car|house|sun|book|film) THIRD => \1 \2 <3 BASE>
(I|you|we|they|people|children|my parents|students|my friends) BASE => \1 <2 THIRD>
(who|which|that) THIRD => \1 <2 BASE>
(he|she|it|Tom|Mary) (has) => \1 have
(he|she|it|Tom|Mary) is => \1 are / \1 be
(he|she|it|Tom|Mary) (doesn't) => \1 don't
(he|she|it|Tom|Mary) (wasn't) => \1 weren't
(we|they|you) (are) => \1 is
(we|they|you) (were) => \1 was
(we|they|you) (aren't) => \1 isn't
(we|they|you) (weren't) => \1 wasn't
(I|we|they|you) (have) => \1 has
(I|we|they|you) (don't) => \1 doesn't
I am => I is / I are
(does) (he|she|it|Tom|Mary|this|that|your \w+) => do \2
do (you|we|they) => does \1
(the|these|those|my|your|his|our) (\w{3,}s) are => \1 \2 is
(the|these|those|my|your|his|our) (\w{3,}s) were => \1 \2 was
(there's|there is) (a|an|no) => there are \2
there are => there is / there's
there were => there was
""",
)

COMPLEMENT = Table(
    "An infinitive stands where a verb asks for -ing, or the other way round.",
    r"""
(enjoy|enjoys|enjoyed|avoid|avoided|finish|finished|mind|keep|keeps|kept|suggest|suggested|stop|stopped|consider|considered|quit|imagine|practice|gave up|give up|giving up|risk|regret|can't help) ING => \1 to <2 BASE> / \1 <2 BASE>
(looking forward to|look forward to|used to|object to|objected to|addicted to) ING => \1 <2 BASE>
(in|at|of|for|without|before|after|by|about|from|on|instead of|than) ING => \1 to <2 BASE> / \1 <2 BASE>
(interested in|good at|afraid of|tired of|fond of|proud of|thinking of|think of|capable of|without|thank you for|insisted on|feel like) ING => \1 to <2 BASE> / \1 <2 BASE>
(want|wants|wanted|decide|decided|decides|hope|hopes|hoped|plan|plans|planned|promised|promise|need|needs|refused|refuse|managed|agreed|expect|expected|offered|'d like|would like|learn|learned|seems?|wish|happened|afford|intend|can't wait|tried|able|going|have|has|had) to BASE => \1 <2 BASE> / \1 <2 ING> / \1 to <2 ING> / \1 for <2 BASE>
(make|makes|made|let|lets|help|helped|saw|see|heard|hear) (OBJ) BASE => \1 \2 to <3 BASE>
(asked|told|wants?|wanted|allowed|advised|expect|'d like|would like|order|ordered) (OBJ) to BASE => \1 \2 <3 BASE> / \1 \2 <3 ING>
(want|wants|wanted|would like|'d like) (you|Tom|Mary) to BASE => \1 that \2 <3 BASE> / \1 \2 that <3 BASE>
(want|wants|wanted) me to BASE => \1 that I <2 BASE>
(want|wants|wanted) him to BASE => \1 that he <2 BASE> / \1 that he <2 THIRD>
(want|wants|wanted) her to BASE => \1 that she <2 BASE> / \1 that she <2 THIRD>
(want|wants|wanted) us to BASE => \1 that we <2 BASE>
(want|wants|wanted) them to BASE => \1 that they <2 BASE>
(suggested|suggest|recommend|recommended|insist) (that )?(you|we) BASE => \1 \3 to <4 BASE> / \1 \3 <4 ING>
(suggested|suggest|recommended|recommend) (that )?I BASE => \1 me to <3 BASE>
(suggested|suggest|recommended|recommend) (that )?he BASE => \1 him to <3 BASE>
(decided|told \w+|asked \w+|tried|promised) not to BASE => \1 to don't <2 BASE> / \1 don't <2 BASE> / \1 to not <2 ING>
(it's|it is|it was) (\w+) to BASE => \1 \2 <3 BASE> / \1 \2 for <3 BASE> / is \2 to <3 BASE>
(too|so) (\w+) to BASE => \1 \2 for <3 ING> / \1 \2 <3 BASE>
(to) BASE => \1 <2 ING> / \1 <2 PAST> / for <2 ING>
""",
)

NEGATION = Table(
    "A negation lacks its auxiliary, has two, or is made twice.",
    r"""
(THIRDSUBJ) (doesn't|does not) BASE => \1 not <3 THIRD> / \1 no <3 BASE> / \1 don't <3 THIRD> / \1 doesn't <3 THIRD> / \1 <3 THIRD> not
(I|you|we|they) (don't|do not) BASE => \1 not <3 BASE> / \1 no <3 BASE> / \1 <3 BASE> not / \1 am not <3 BASE>
(SUBJ) (didn't|did not) BASE => \1 not <3 PAST> / \1 didn't <3 PAST> / \1 didn't <3 PART> / \1 <3 PAST> not / \1 wasn't <3 BASE>
(don't|doesn't|didn't|can't|couldn't|won't|haven't|never) (.{2,24}) any(thing|body|where|one|more)? => \1 \2 no\3
(don't|doesn't|didn't|can't|couldn't|won't|haven't) (.{2,24}) anything => \1 \2 nothing
(don't|doesn't|didn't|can't|couldn't|won't|haven't) (.{2,24}) anyone => \1 \2 nobody / \1 \2 noone
(don't|doesn't|didn't|can't|couldn't|won't|haven't) (.{2,24}) ever => \1 \2 never
(nobody|no one) THIRD => \1 doesn't <2 BASE> / \1 don't <2 BASE>
(nobody|no one) PAST => \1 didn't <2 BASE> / \1 didn't <2 PAST>
(nobody) (can|could|will|would) => \1 \2n't
(I|we|they|you) never BASE => \1 don't never <2 BASE> / \1 never don't <2 BASE>
(THIRDSUBJ) never THIRD => \1 doesn't never <2 BASE> / \1 never <2 BASE>
(can't|cannot) BASE => \1 to <2 BASE> / don't can <2 BASE> / can no <2 BASE>
(don't) (have to) => haven't to / \1 must
(mustn't|must not) BASE => don't must <2 BASE>
(isn't|aren't|wasn't) => is no / not is
don't BASE => no <1 BASE> / not <1 BASE>
""",
)

QUESTION = Table(
    "A question lacks `do` or has the order of a statement, or a clause has that of a question.",
    r"""
(where|what|when|why|how|who) (are|is|was|were|can|will|should|have|has) (I|you|he|she|it|we|they|Tom|Mary) => \1 \3 \2
(where|when|why|how|what|how often|how long|what time|who|which) do (I|you|we|they|people) BASE => \1 \2 <3 BASE> / \1 <3 BASE> \2 / \1 does \2 <3 BASE>
(where|when|why|how|what|what time|who) does (he|she|it|Tom|Mary|this \w+|that \w+|the \w+|your \w+) BASE => \1 \2 <3 THIRD> / \1 <3 THIRD> \2 / \1 does \2 <3 THIRD> / \1 do \2 <3 BASE>
(where|when|why|how|what|who|what time) did (SUBJ|your \w+|the \w+) BASE => \1 \2 <3 PAST> / \1 did \2 <3 PAST> / \1 <3 PAST> \2
what does (this|that|it|\w+ \w+) mean => what means \1 / what \1 means / what \1 mean
(how much|what) does (.{2,20}) cost => \1 costs \2 / \1 \2 costs
what did (OBJ|you|he|she|they|Tom|Mary) say => what said \1 / what \1 said
^do (you|they|we) BASE => \1 <2 BASE> / are \1 <2 BASE> / does \1 <2 BASE>
^does (he|she|it|Tom|Mary|your \w+) BASE => \1 <2 THIRD> / does \1 <2 THIRD> / do \1 <2 BASE> / is \1 <2 BASE>
^did SUBJ BASE => \1 <2 PAST> / did \1 <2 PAST> / was \1 <2 BASE>
who PAST (the|a|that|this|my|it|you|him) => who did <1 PAST> \2 / who did <1 BASE> \2
(know|knows|knew|wonder|wondered|asked|tell me|told me|remember|see|understand|find out|sure|idea|me|him) (where|what|who|how|when|why|how old|how much|which \w+|what time) (SUBJ|the \w+|my \w+|your \w+|this|that|POSS \w+) (is|was|are|were|can|will|should|has|have|could|would) => \1 \2 \4 \3 / \1 that \2 \4 \3
(know|knows|knew|wonder|wondered|asked|tell me|told me|remember|see|understand|sure|idea|me) (where|what|how|when|why) (THIRDSUBJ) THIRD => \1 \2 does \3 <4 BASE> / \1 \2 \3 <4 BASE>
(know|knows|knew|wonder|wondered|asked|tell me|told me|remember|see|understand|sure|idea|me) (where|what|how|when|why) (you|they|we|I) BASE => \1 \2 do \3 <4 BASE> / \1 \2 <4 BASE> \3
(know|knows|knew|wonder|wondered|asked \w+|told \w+|remember|see|understand|sure|idea|me) (where|what|how|when|why) (SUBJ) PAST => \1 \2 did \3 <4 BASE> / \1 \2 did \3 <4 PAST>
""",
)

ORDER = Table(
    "A word stands in the place that another language would give it.",
    r"""
(like|likes|liked|love|enjoy|enjoyed|want|appreciate|miss|loves|helped) (.{2,22}) (very much|a lot|so much) => \1 \3 \2
(I|you|we|they) (always|often|usually|never|sometimes|rarely|already|also|really|seldom) BASE => \1 <3 BASE> \2 / \2 \1 <3 BASE>
(he|she|it|Tom|Mary) (always|often|usually|never|sometimes|rarely|already|also|really|seldom) THIRD => \1 \3 \2
(he|she|it|Tom|Mary) (always|often|usually|never|sometimes|rarely|already|also|really|seldom) PAST => \1 \3 \2
(SUBJ) (always|often|usually|never|sometimes|already|also|really) PAST => \1 \3 \2
(have|has|had|I've|we've) (never|always|already|just|ever) PART => \1 \3 \2
(speaks?|spoke|play|plays|played|know|knows|learn|sings?) (English|French|German|Japanese|Spanish|the \w+|tennis|it|me|him|her) (very well|well|fluently|fast|a little|often|every day) => \1 \3 \2
(pick|picked|take|took|put|turn|turned|give|gave|throw|threw|wake|woke|write|wrote|try|tried|call|called|bring|brought) (it|him|her|them|me|us) (up|off|on|down|back|away|out) => \1 \3 \2
(went|go|came|come|arrived|was|were|is|are|be|goes|am) (\w+) (yesterday|today|tomorrow|tonight|now) => \1 \3 \2
(not|very|quite|so|too) (\w+) enough => enough \2
(what) (a|an) (\w+) (\w+) => \1 \3 \4 / \1 for \2 \3 \4
(gave|give|showed|show|sent|send|told|lend|lent|bought) (me|him|her|us|them|you) (a|the|some|my|his|her) (\w+) => \1 \3 \4 \2 / \1 to \2 \3 \4
(only|even|just) (a|one|two|three|the) => \2 \1
(both|all) of (us|them|you) => \2 \1 of / the \1 of \2
(what|who|where) (else) => \2 \1 / \1 other
(too) ([a-z]+) => \1 much \2
""",
)

SUBJECT = Table(
    "A sentence lacks its subject, or has it twice.",
    r"""
it's (\w+) => is \1
it is (\w+) => is \1
it was (\w+) => was \1
it (rained|snowed|seems|looks|happened|takes|took) => \1
(because|think|believe|know|hope|said|if|when|that|but) (it|he|she) (is|was|will|would|can) => \1 \3
POSS (father|brother|uncle|son|husband|grandfather|dad|boss) (is|was|has|will|can|\w+s|\w+ed) => \1 \2 he \3
POSS (mother|sister|aunt|daughter|wife|grandmother|mom) (is|was|has|will|can|\w+s|\w+ed) => \1 \2 she \3
(Tom|the man|the boy|my friend) (is|was|has|will|can) => \1 he \2
(Mary|the girl|the woman) (is|was|has|will|can) => \1 she \2
(my dog|this book|the book|the car) (is|was|has|will|can) => \1 it \2
there('s| is| was| are| were) => there it\1 / is there
(give|gave|show|showed|tell|buy|bought) (it) to => \1 to
(like|love|want|need|know|saw|find|found|bought|enjoyed|believe) (it|them)([.?!]) => \1\3
""",
)

RULES: tuple[Rule, ...] = (
    TENSE, WOULD, SINCE, PAST, PERFECT, AGREEMENT, AGREEMENT, COMPLEMENT, COMPLEMENT, NEGATION,
    QUESTION, QUESTION, ORDER, SUBJECT,
)  # fmt: skip
