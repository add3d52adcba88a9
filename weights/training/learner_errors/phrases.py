"""Prepositions and words that another language would have in the place of the right ones."""

from .tables import Table

GOVERNED = Table(
    "A verb or an adjective has the wrong preposition, none, or one that it should not have.",
    r"""
(depends?|depended|depending) on => \1 of / \1 from
(married) to => \1 with
(engaged) to => \1 with
(discuss|discussed|discussing) (it|this|that|the|POSS) => \1 about \2
(listen|listens|listened|listening) to => \1 / \1 at
(wait|waits|waited|waiting) for (OBJ|the|POSS) => \1 \2
(wait|waits|waited|waiting) for => \1 on / \1 to
(look|looks|looked|looking) at (OBJ|the|POSS) => \1 \2 / \1 to \2 / \1 on \2
(look|looks|looked|looking) for (a|OBJ|the|POSS) => \1 \2 / \1 after \2
(look|looking|looks) forward to => \1 forward / \1 forward for
(ask|asks|asked|asking) (OBJ) (to|if|for|about|why|where|what) => \1 to \2 \3
(answer|answered) (the|POSS|my) (question|questions|letter|phone) => \1 to \2 \3 / \1 on \2 \3
(call|called|help|helped|thank|thanked) (OBJ) => \1 to \2
(tell|tells|told) (OBJ) => \1 to \2
(explain|explained|describe|described|suggest|suggested) (it|this|that|everything) to (OBJ) => \1 \3 \2
(explain|explained) to (OBJ) => \1 \2
(enter|entered) the => \1 in the / \1 into the / \1 to the
(reach|reached) the => \1 to the
(good|bad|terrible|excellent) at => \1 in / \1 on
(afraid|scared|ashamed|tired|sick|jealous|capable) of => \1 from / \1 about
(proud|fond|aware) of => \1 on / \1 for / \1 with
(full) of => \1 with / \1 from
(interested) in => \1 on / \1 for / \1 about / \1 of
(famous|responsible|ready|late) for => \1 of / \1 to
(worried|excited|happy|sorry|angry|serious) about => \1 of / \1 for / \1 on
(different) (from) => \1 of / \1 to that of / \1 as
(similar) to => \1 with / \1 as
(same) (\w+) as => \1 \2 like / \1 \2 than / \1 \2 that
(thank you|thanks) for => \1 of / \1 about
(think|thinks|thought|thinking) (about) => \1 on / \1 to / \1 in
(believe|believes|believed) in => \1 on / \1 at
(belong|belongs|belonged) to => \1 for / \1
(dream|dreams|dreamed|dreaming) (of|about) => \1 with / \1 on
(laugh|laughs|laughed|laughing) at => \1 about / \1 over / \1 of
(consists?|consisted) of => \1 from / \1 in
(pay|pays|paid) for (OBJ|the|POSS|it|this) => \1 \2
(take|takes|took) part in => \1 part at / \1 part on / \1 part of
(participate|participated|succeed|succeeded) in => \1 at / \1 on / \1 to
(spend|spends|spent) (.{3,24}) on => \1 \2 for / \1 \2 in
(prefer|prefers) (\w+) to (\w+) => \1 \2 than \3 / \1 \2 over than \3
(remind|reminds|reminded) (OBJ) of => \1 \2 to / \1 \2 at / \1 \2 on
(agree|agrees|agreed) with => \1 to / \1
(smiled?|shouted|yelled|pointed|stared|staring) at => \1 to / \1 on
(apologize|apologized) (to OBJ )?for => \1 \2of
(apply|applied|applying) for => \1 to / \1 at
(accused|suspected) (OBJ) of => \1 \2 for
(prevent|prevented|stop|stopped) (OBJ) from => \1 \2 of / \1 \2 to
(blame|blamed|forgive|forgave) (OBJ) for => \1 \2 of
(care|cares|cared) about => \1 of
(try|tried) on => \1 in
(contact|contacted|marry|married|phone|phoned|met) (OBJ) => \1 with \2
(attend|attended|visit|visited) (the|POSS|OBJ) => \1 to \2
(rely|relies|relied|concentrate|insist|insists|insisted) on => \1 in / \1 to / \1 at
""",
)

PLACE_AND_TIME = Table(
    "A time or a place has the wrong preposition, none, or one too many.",
    r"""
on (Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday)s? => in \1 / at \1 / the \1
in the (morning|afternoon|evening) => at the \1 / on the \1 / the \1
at night => in the night / on night
at (\d+|six|seven|eight|nine|ten|two|three|noon|midnight) => in \1 / on \1
at (\d+:\d+|2:30) => in \1 / on \1
in (1[0-9]{3}|20[0-9]{2}) => at \1 / on \1 / in the \1
in (January|March|April|May|June|July|August|September|October|November|December) => at \1 / on \1
(next|last) (week|month|year|summer|winter|night) => the \1 \2 / in \1 \2 / on \1 \2
on (weekends|vacation|holiday|strike) => in \1 / at \1s
at (home) => in \1 / to \1
go home => go to home / go at home
(went|come|came|get|got|walked) home => \1 to home / \1 at home
(go|went|been|going) there => \1 to there
(come|came) here => \1 to here
on the (bus|train|phone|Internet|radio|wall|second floor) => at the \1 / in \1 / by the \1
on (TV|foot|time|purpose) => in \1 / by \1 / with \1
by (car|bus|train|plane|bicycle|bike|taxi|ship) => with \1 / by the \1 / on \1
in the picture => on the picture / at the picture
in (English|French|German|Japanese|Spanish) => on \1 / at \1 / with \1
in (Boston|Australia|Japan|Germany|France|London|Paris|America|town) => at \1 / on \1 / to \1
(go|goes|went|going|come|came|moved|travel|traveled|been) to (Boston|Australia|Japan|Germany|France|London|Paris|America) => \1 in \2 / \1 at \2 / \1 \2 / \1 into \2
(go|goes|went|going) to (bed|school|work|church|sleep) => \1 in \2 / \1 at \2 / \1 \2
(arrive|arrived|arrives) (at|in) => \1 to / \1 on
at the (station|airport|party|door|hospital|meeting|bus stop) => on the \1 / to the \1
by (tomorrow|Monday|Friday|then|noon|2:30|next \w+) => until \1 / till \1
until (tomorrow|Monday|Friday|2:30|late|midnight) => to \1 / since \1
(NUM|one) (SPAN) ago => before \1 \2 / \1 \2 before / there is \1 \2
(a) (year|month|week|few minutes|few days|long time) ago => before \1 \2 / \1 \2 before
in front of => in front from / before of / in the front of
next to => next of / near to of / nearby
(near) (the|my|here) => \1 of \2 / \1 to the \2
in the world => on the world / at the world
at the (end|beginning) of => in the \1 of / on the \1 of
at the moment => in the moment / on the moment
at least => on least / at last least / in least
(every day) => all days / every days / everyday
all day => all the day / whole the day
(once|twice|three times) a (day|week|month|year) => \1 in \2 / \1 by \2
for the first time => the first time / at the first time / by the first time
in spite of => in spite / despite of / inspite of
because of => because / because from
without => with no of / without of
""",
)

WORD_CHOICE = Table(
    "A word is confused with one that another language does not distinguish from it.",
    r"""
told (OBJ) => said \1 / said to \1 that
tells (OBJ) => says \1
tell (OBJ) => say \1
(tell|tells|told|telling) (the truth|a lie|lies|a story|a joke) => say \2 / speak \2
(say|said|saying) (hello|goodbye|sorry) => tell \2 / told \2
do (POSS|the) (homework|dishes|laundry|shopping|housework|job|best) => make \1 \2
did (POSS|the) (homework|dishes|laundry|shopping|housework|job|best) => made \1 \2
doing (POSS|the) (homework|dishes|laundry|shopping|housework|job|best) => making \1 \2
do (me|us|him|her|you) a favor => make \1 a favor / give \1 a favor
make (a|the same|many|any) (mistakes?|decision|promise|plan|choice|phone call|noise) => do \1 \2
made (a|the same|many|any) (mistakes?|decision|promise|plan|choice|phone call|noise) => did \1 \2
make (money|friends|progress|sure|fun|sense) => do \1
made (money|friends|progress|sure|fun|sense) => did \1
lend (OBJ) => borrow \1
lent (OBJ) => borrowed \1
borrow (your|his|her|my|their|some|this|that) => lend \1
borrowed (.{3,16}) from => lent \1 from
got (a|an|your|my|his|her|the) (letter|present|gift|email|call|answer|job|message|ticket) => became \1 \2
get (a|an) (letter|present|gift|email|call|answer|job|message|ticket) => become \1 \2
(take|taking) (a|some|any|your|my|the) (picture|photo|pictures|photos) => make \2 \3 / do \2 \3
took (a|some|any|your|my|the) (picture|photo|pictures|photos) => made \1 \2 / did \1 \2
take a (shower|bath|break|walk|nap) => make a \1 / do a \1
took a (shower|bath|break|walk|nap) => made a \1 / did a \1
missed (the|my|his|her|our|a) (bus|train|plane|flight) => lost \1 \2
miss (the|my|his|her|our|a) (bus|train|plane|flight) => lose \1 \2
watch (TV|television) => see \1 / look \1
watching (TV|television) => seeing \1 / looking \1
watched (TV|television) => saw \1 / looked \1
hear (a noise|the news|a sound|that) => listen \1
heard (a noise|the news|a sound|that) => listened \1
remind (OBJ) => remember \1
reminds (OBJ) => remembers \1
teach (OBJ) => learn \1
taught (OBJ) => learned \1
learn (a lot|French|English|German|to) => teach \1
turn on the (light|lights|TV|radio) => open the \1
turn off the (light|lights|TV|radio) => close the \1
(not|n't) (.{3,40}) either => \1 \2 too / \1 \2 neither / \1 \2 also
(the|a) (man|woman|boy|girl|person|guy|doctor|teacher) who => \1 \2 which / \1 \2 what
(people|someone|somebody|anyone|those|everyone) who => \1 which / \1 what
(everything|nothing|anything|something|all) (SUBJ) => \1 what \2 / \1 which \2
(the) (book|car|house|letter|picture|movie|dog|thing|song) that => \1 \2 who / \1 \2 what
what is it called => how is it called / how it is called
what (do|did) (you|they|we) (call|think|look like) => how \1 \2 \3
what's (your|his|her) name => how is \1 name / which is \1 name
how (do|did) (you|they) know => from where \1 \2 know
(\w+er) than => \1 then / \1 that / \1 as
(more|less) (\w+) than => \1 \2 then / \1 \2 that / \1 \2 as
as (\w+) as => as \1 like / so \1 like / as \1 than / so \1 as
(such) (an?) => so \2 / \1
so (many|much) => such \1 / that so \1
even though => although even / even / even although
even if => even when if / also if
although (.{4,40}), => although \1, but
because (.{4,40}), => because \1, so
(very) (much|well|good|old|big|tired|happy|hard) => much \2
too (late|early|big|small|young|old|expensive|much) => too much \1 / very too \1
(is) ([a-z]+teen|NUM) years old => has \2 years / has \2 years old / \1 \2 years
(am|'m) ([a-z]+teen|NUM) years old => \1 \2 years
(was|were) ([a-z]+teen|NUM) years old => had \2 years / had \2 years old
you're right => you have right / you have reason / you are in right
I'm (hungry|thirsty|cold|sleepy) => I have \1 / I have got \1
I (agree|disagree) => I am \1 / I'm \1
(we|you|they) (agree|disagree) => \1 are \2
(do|don't) you agree => are you agree
there are (many|a lot of|some|NUM|no) => there is \1 / it has \1 / it gives \1 / are \1
there is (a|an|no|some) => it has \1 / it gives \1 / there are \1 / there has \1
there was (a|an|no|some) => it had \1 / it gave \1 / there were \1 / had \1
there were (many|a lot of|some|NUM|no) => there was \1 / it had \1
(each) other => \1 another / the \1 other
one another => one other / each another
(other) (people|things|countries|children|students) => another \2 / others \2
another (one|way|time|day|question|cup|beer|book|job) => other \1 / an other \1 / one other \1
(the) others => \1 anothers
(a) few (\w+s) => \1 little \2 / \1 few of \2
(a) little (money|time|water|milk|bit|more|French|English) => \1 few \2
(as) soon as => \1 soon / so soon as / how soon as
(so) that (SUBJ) can => for \2 can / for that \2 can
instead of => instead / in place to / instead from
(I|we|they|he|she) would like to => \1 would to like / \1 like to would / \1 want like to
(feel|feels|felt) (better|sick|tired|good|happy|sad|lonely|ill) => \1 me \2 / \1 myself \2
(how) long => \1 much time / \1 long time
(how) often => \1 many times often / \1 much often
(how) far => \1 much far / \1 long far
(still) (\w+ing|not|don't|doesn't|haven't) => yet \2 / always \2
(haven't|hasn't) PART (.{0,24}) ?yet => \1 \2 \3 already / \1 \2 \3 still
to (find|buy|get|see|learn|help|become|make|go|meet) => for \1 / for to \1
can BASE => can to \1
be able to => can to / be able / be capable to
(will|'ll|won't|would) be able to => \1 can / \1 be able
""",
)

UNCOUNTABLE = Table(
    "A noun that has no plural gets one, or an article of one.",
    r"""
(some|any|much|more|the|POSS|this|that|no|of|good|new|important) (information|advice|furniture|homework|luggage|baggage|equipment|knowledge|progress|evidence|news|research|traffic|bread|money|work) => \1 \2s
(information|advice|furniture|homework|luggage|baggage|equipment|knowledge) => \1s
some (information|advice|furniture|luggage|news|homework|bread|work|evidence) => an \1 / some \1s / a \1
(a piece of|a bit of) (information|advice|furniture|news|bread|luggage) => an \2 / a \2 / one \2
(good|bad|great|fresh) (news|advice|weather|luck|work|information|music) => a \1 \2
what (good|bad|nice|beautiful|terrible|great) (weather|news|luck|advice) => what a \1 \2
(the|this|that|his|her|my) (news|information|money|advice|furniture|luggage|homework) is => \1 \2 are / \1 \2s are
(the|this|that|his|her|my) (news|information|money|advice|furniture|luggage|homework) was => \1 \2 were / \1 \2s were
(so |too |how )?much (money|time|water|work|noise|food|milk|trouble|information|help|coffee|beer|sugar|rain|snow|fun) => \1many \2
(so |too |how )?many (people|friends|books|things|children|questions|times|mistakes|problems|languages|cars|students|countries|hours) => \1much \2
(less) (money|time|water|work|noise|food|milk|trouble) => fewer \2 / lesser \2 / littler \2
(few|fewer) (people|friends|books|things|mistakes|students) => less \2 / little \2
(a lot|lots) of => \1 / a lots of / \1 from
(your|his|her|my|their|brown|black|long|blond|gray|short) hair is => \1 hairs are / \1 hairs is
hair => hairs
""",
)
