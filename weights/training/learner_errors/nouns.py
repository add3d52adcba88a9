"""Articles, numbers, possessives, adjectives and adverbs as learners use them."""

import random
import re

from .tables import Lexicon, Rule, Table, replace

ARTICLE = Table(
    "An article is missing where there must be one, or there is one where there must be none.",
    r"""
(I'm|he's|she's|you're|is|was|am|are|become|became|being|be) (a|an) (\w+) => \1 \3 / \1 the \3 / \1 one \3
(have|has|had|need|needs|want|wants|bought|buy|wrote|saw|see|got|find|found|eat|ate|read|gave|made|take|took) (a|an) (\w+) => \1 \3 / \1 one \3
(such|quite|what|half) (a|an) (\w+) => \1 \3 / \2 \1 \3
(there is|there was|there's) (a|an) (\w+) => \1 \3 / \1 the \3
(a|an) (lot|few|little bit|couple|hundred|thousand) => \2
(once|twice|times) (a|an) (day|week|month|year|hour) => \1 \3 / \1 the \3
for (a) (long time|while|walk|moment|week|month|year) => for \2 / for the \2
the (sun|moon|sky|world|earth|police|radio|piano|guitar|violin|same|first|second|third|last|next day|best|worst|only|most|Internet|truth|weather|station|airport|United States|beach|sea|window|door|phone|future|past|morning|afternoon|evening|army|president|government) => \1
the (\w+est) => \1 / a \1 / most \1
(in|on|at|to) (the) (morning|afternoon|evening|hospital|garden|kitchen|park|city|country|bathroom|beach|station|table|floor|wall) => \1 \3
(love|loves|like|likes|hate|hates|prefer|prefers|study|studies|drink|drinks|play|plays|learn|teaches|hates) (music|coffee|tea|milk|beer|wine|tennis|football|soccer|baseball|chess|golf|fish|meat|rice|history|math|science|dogs|cats|children|animals|chocolate|cheese|money|sports) => \1 the \2
(speak|speaks|spoke|learn|study|studies|studying|understand|teaches|speaking) (English|French|German|Japanese|Spanish) => \1 the \2 / \1 a \2
(in|to|from|at) (Boston|Japan|Germany|France|London|Paris|Italy|Europe|America|nature|love|danger|bed|school|church|prison) => \1 the \2
(life|love|money|time|nature|music|health|history|happiness|art|water|people|children|men|women|dogs|cats) (is|are|can|has|have|makes|like) => the \1 \2
(have|had|eat|ate|eating|for|having|before|after) (breakfast|lunch|dinner|supper) => \1 the \2 / \1 a \2
(play|plays|played|playing) (tennis|football|soccer|baseball|basketball|chess|cards|golf) => \1 the \2 / \1 at \2 / \1 a \2
most (people|of the time|students|children|women|men) => the most \1 / most of \1 / the most of \1
(my|your|his|her|our|their) (mother|father|friend|house|car|dog|parents|brother|sister|wife|husband|name) => the \1 \2 / a \1 \2 / \2
(last|next) (week|month|year|Monday|Friday|summer|night) => the \1 \2
at (first|last|night|noon|home|least) => at the \1
on (Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday) => on the \1 / in the \1
a (good|bad|nice|big|new|beautiful|long|small|very|great|little|young|strange) => \1 / an \1 / one \1
an (old|apple|hour|idea|umbrella|accident|important|interesting|honest|easy|hour's|egg|answer) => a \1 / \1
a (university|European|uniform|useful|one|usual) => an \1 / \1
""",
)

PLURAL = Table(
    "A noun has the wrong plural, or none beside a word that asks for one.",
    r"""
(NUM) people => \1 person / \1 peoples
(NUM) children => \1 childs / \1 child
(NUM) men => \1 man / \1 mans
(NUM) women => \1 woman / \1 womans
(the|many|two|three|these|some|POSS|those) children => \1 childs / \1 childrens / \1 child
children => childs / childrens
(people|police) (are) => \1 is
people (were) => people was
people (have) => people has
people BASE => people <1 THIRD>
people => peoples
(men|women) => \1s
men => mans
women => womans / womens
feet => foots / feets
teeth => tooths / teeths
mice => mouses / mices
sheep => sheeps
wives => wifes
knives => knifes
(the|these|fallen|of|dead) leaves => \1 leafs
(their|our|your|of) lives => \1 lifes
(two|three|four|five|many|of the) (countr|cit|part|bab|stor|famil|lad)ies => \1 \2ys / \1 \2y / \1 \2yes
(every|each) (day|week|year|morning|night|time|student|child|man|woman|country|house|room) => \1 \2s
(these) (\w+s) => this \2
(those) (\w+s) => that \2
(one of) (the|my|your|his|her|our|their|these|those) (\w+)s => \1 \2 \3
both (\w+) are => both \1 is
both of (us|them|you) are => both of \1 is
both of (us|them|you) were => both of \1 was
(everyone|everybody|nobody|no one|someone|each of us) is => \1 are
(everyone|everybody|nobody|no one|someone) was => \1 were
(everyone|everybody|nobody|no one|someone) has => \1 have
(everyone|everybody|nobody|no one|someone) THIRD => \1 <2 BASE>
POSS (parents|friends|children|brothers|sisters) are => \1 \2 is
POSS (parents|friends|children|brothers|sisters) were => \1 \2 was
POSS (parents|friends|children|brothers|sisters) have => \1 \2 has
one of (.{4,22}s) is => one of \1 are
one of (.{4,22}s) was => one of \1 were
one of (.{4,22}s) has => one of \1 have
""",
)

COMPARISON = Table(
    "A comparative or a superlative is made twice, or in the wrong way.",
    r"""
better => more better / more good / gooder / more well
worse => more bad / more worse / badder / worser
(the) best => the most best / the most good / the better / the goodest
(the) worst => the most bad / the baddest / the most worst
(taller|older|younger|faster|smaller|cheaper|harder|longer|stronger|shorter|smarter|richer|higher|warmer|colder|slower) => more \1
(tall|old|young|fast|small|cheap|hard|long|strong|short|smart|rich|high|warm|cold|slow)er => more \1
(bigger|hotter|thinner|fatter) => more \1
bigger => more big
hotter => more hot
(earlier|easier|heavier|happier|busier|prettier) => more \1
earlier => more early
easier => more easy
happier => more happy
the (\w{3,})est => the most \1est / the more \1
the (tall|old|young|fast|small|cheap|hard|long|strong|short|smart|rich|high)est => the most \1
the biggest => the most big / the bigger / the most biggest
the easiest => the most easy
more (interesting|important|beautiful|difficult|expensive|careful|dangerous|popular|useful) => \1er / most \1 / more \1er
the most (interesting|important|beautiful|difficult|expensive|famous|dangerous|popular) => the more \1 / the \1est / most \1
much (better|worse|bigger|older|more|faster|easier) => very \1 / much more \1 / more \1
as (tall|old|good|fast|big|rich|smart) as => as \1er as / so \1 than
less => lesser
further => more far
sooner => more soon
more and more => always more / each time more / more and more of
""",
)

ADJECTIVES = (
    "big small blue red green black white beautiful different important new old young other "
    "expensive happy interesting difficult good bad great little long short strong nice rich poor "
    "foreign old-fashioned dangerous delicious cheap warm cold clean dirty funny strange"
).split()

_ADJECTIVE = "|".join(ADJECTIVES)

ADJECTIVE = Table(
    "An adjective gets a plural, stands after its noun, or is a verb's form with another meaning.",
    rf"""
({_ADJECTIVE}) (\w+s) => \1s \2
(a|an) (very|really) ({_ADJECTIVE}) (\w+) => a \4 \2 \3
(a|an) ({_ADJECTIVE}) (car|house|book|dog|man|woman|day|film|movie|city|room|story|song|place|dress|shirt|girl|boy) => a \3 \2
(blue|brown|green|long|black|short|big|gray) (eyes|hair|ears|legs|hands) => \2 \1 / \2s \1 / \1s \2
(is|was|are|were|'m|'re|'s|am|feel|got|get|be) (bored|interested|excited|surprised|tired|disappointed|confused|scared|shocked|embarrassed|worried|frightened) => \1 \2s / \1 to \2
(I'm|I am|he is|he's|she is|she's|Tom is|Tom was|he was|she was|I was|got|feel|felt|looks|looked|very|so) (bor|excit|surpris|interest|disappoint|confus|shock|embarrass|frighten|satisfi)ed => \1 \2ing
(bor|excit|interest|surpris|confus|disappoint)ing (book|movie|story|news|day|game|film|lecture) => \1ed \2
(hard|old|tall|big|good|rich|strong|young|well|early|warm|fast) enough => enough \1 / enough of \1
enough (money|time|food|water|room|sleep) => \1 enough of / enough of \1
such (an?) ({_ADJECTIVE}) (\w+) => \1 so \2 \3 / so \2 \3 / so \1 \2 \3
""",
)

ADVERB = Table(
    "An adjective stands where an adverb must, or an adverb where an adjective must.",
    r"""
(very|so|quite|pretty|really|as) well => \1 good / \1 goodly
(speak|speaks|swim|swims|sing|sings|sleep|slept|cook|cooks|play|plays|drive|dance|feel) well => \1 good
(English|French|German|Japanese|Spanish|piano|guitar|tennis|me|you|him) (very )?well => \1 \2good
(work|works|worked|working|study|studies|studied|studying|tried|try|raining) (very )?hard => \1 \2hardly
(run|runs|ran|drive|drives|drove|speak|speaks|talk|walk|swim) (so |too |very )?fast => \1 \2fastly / \1 \2quick
(looks?|looked|sounds?|tastes?|smells?|feels?) (good|bad|great|happy|sad|nice|delicious|terrible|strange|beautiful) => \1 \2ly / \1 well
almost => most / nearly of
(recently|lately) => last time / in the last time
(hardly) (\w+) => hard \2
""",
)

POSSESSIVE = Table(
    "A possessive lacks its apostrophe, or a pronoun has the wrong form.",
    r"""
(Tom|Mary|mother|father|brother|sister|friend|teacher|boss|man|woman|dog|everyone|today|tomorrow|yesterday)'s (\w{3,}) => \1s \2 / \1 \2 / \1s' \2
(a) (friend|cousin|colleague|book|student|picture) of mine => \1 \2 of me / \1 \2 of my
(friend|friends) of yours => \1 of you / \1 of your
(friend|friends) of hers => \1 of her / \1 of she
(friend|friends) of his => \1 of him / \1 of he
(friend|friends) of (our|their)s => \1 of \2
(is|are|isn't|was) mine => \1 my / \1 mines
(is|are|isn't|was) (your|our|her|their)s => \1 \2 / \1 \2's
mine (is|was) => my \1 / the my \1
himself => hisself / him self / himselfs
themselves => theirselves / themself
(my|your|her|him)self => \1 self / \1selfs
(with|for|about|from|of) me => \1 I
(with|for|about|from|of) him => \1 he
(with|for|about|from|of) them => \1 they
(with|for|about|from|of) us => \1 we
its (own|tail|name|color|way|mother|head) => it's \1
(he|Tom|my father|my brother) (.{4,24}) his (wife|mother|car|hat|hands|head) => \1 \2 him \3
(she|Mary|my mother|my sister) (.{4,24}) her (husband|mother|car|hat|hands|head) => \1 \2 she \3
""",
)

NOT_ADVERBS = set(
    "family only early daily friendly lovely lonely ugly holy silly jelly italy july reply apply "
    "supply fly really likely hardly nearly lately shortly".split()
)


def bare_adverb(text: str, rng: random.Random, lexicon: Lexicon) -> str | None:
    """Write an adverb in -ly as the adjective that it is made of."""
    places = []
    for found in re.finditer(r"(?<!^)\b([a-z]{3,})ly\b", text):
        stem = found[1] + "le" if found[1][-1] in "b" else found[1]
        stem = found[1][:-1] + "y" if found[1].endswith("i") else stem
        if found[0] not in NOT_ADVERBS and stem in lexicon.words:
            places.append((found, stem))
    return replace(text, *rng.choice(places)) if places else None


_MANY = (
    r"(two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|thirty|many|several|few|these|"
    r"those|both|[2-9]|[1-9][0-9]+|a lot of|lots of|all the|so many|too many|any|other|most)"
)


def bare_plural(text: str, rng: random.Random, lexicon: Lexicon) -> str | None:
    """Write a singular after a number or another word that asks for a plural."""
    places = [
        (found, f"{found[1]} {single}")
        for found in re.finditer(rf"\b{_MANY} ([a-z]{{4,}}s)\b(?!')", text, re.IGNORECASE)
        if (single := lexicon.singular(found[2]))
    ]
    return replace(text, *rng.choice(places)) if places else None


RULES: tuple[Rule, ...] = (
    ARTICLE, ARTICLE, PLURAL, COMPARISON, ADJECTIVE, ADVERB, POSSESSIVE, bare_adverb, bare_plural,
)  # fmt: skip
