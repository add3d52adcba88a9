"""Spellings by ear or by habit, capitals, words written apart or together, and punctuation."""

import random
import re

from .tables import Lexicon, Rule, Table, replace

MISSPELT = Table(
    "A word is spelt as it sounds, or as it often is.",
    r"""
because => becouse / becuase / becaus / becose / beacause / cause of
beautiful => beautifull / beatiful / beautyful / butiful
tomorrow => tomorow / tommorow / tommorrow / tomorrrow
believe => beleive / belive / beleave
receive(d?) => recieve\1 / receve\1
friend(s?) => freind\1 / frend\1
really => realy / relly / realley
definitely => definately / definitly / definetly
different => diferent / differant / diffrent
interesting => intresting / interresting / interessting
necessary => neccessary / necesary / neccesary
usually => usualy / usally / ussually
probably => probaly / propably / probabily
immediately => immediatly / imediately
separate => seperate
until => untill / untile
language(s?) => langauge\1 / languague\1 / lenguage\1
restaurant(s?) => restorant\1 / restaurent\1 / resturant\1
weather => wheather / wether
whether => wether / weather
which => wich / whitch / witch
with => whit / wiht / whith
writing => writting / writeing
written => writen / writtten
coming => comming / comeing
making => makeing / makking
studying => studing / studiing
beginning => begining / beggining
happened => happend / hapened
happen => hapen
stopped => stoped / stoppt
tried => tryed
sincerely => sincerly
address => adress / addres
accommodation => accomodation
environment => enviroment
government => goverment / governement
business => buisness / bussiness / bisness
successful => succesful / successfull / sucessful
success => succes / sucess
careful => carefull
useful => usefull
grateful => greatful / gratefull
problem(s?) => probleme\1 / problen\1
exercise => excercise / exercice
example => exemple / exampel
comfortable => confortable / comftable
responsible => responsable / responsibel
important => importent / importand / inportant
appointment => apointment / appointement
opportunity => oportunity / opportunety
apartment => appartment / apartement
difficult => dificult / difficoult / difficullt
people => peaple / poeple / peopel / pepole
thought => thougt / tought / thougth
through => trough / throught / thru
though => tough / thow
enough => enought / enuff / enogh
tonight => tonite / tonigth / to night
night => nigth / nite / nigh
right => rigth / rihgt
daughter => doughter / dauther
neighbor(s?) => neigbor\1 / nieghbor\1 / neighboor\1
foreign => foriegn / foreing
knowledge => knowlege / knoledge
know => now / konw / kno
known => knowen / knwon
strength => strenght
length => lenght
height => hight / heigth
eight => eigth
forty => fourty
ninth => nineth
twelfth => twelvth
Wednesday => Wensday / Wendsday / Wednsday
February => Febuary / Februar
always => allways / alwais / alway
almost => allmost
also => allso / als
together => togheter / togather / togehter
without => whitout / witout / without of
already => allready / alredy
bought => buyed / bougt / bouth
their => thier / there
they => thay / they're
there => ther / thare
where => were / wher / whear
sure => shure
school => shool / scool / schol
quiet => quite / quit
quite => quiet
lose => loose
loser => looser
weird => wierd
surprise(d?) => suprise\1 / surprice\1
guarantee => garantee / guarentee
recommend(ed)? => recomend\1 / reccomend\1
embarrass(ed|ing) => embarass\1 / embarras\1
disappoint(ed|ing) => dissapoint\1 / disapoint\1
appreciate(d?) => apreciate\1 / appriciate\1
disappear(ed)? => dissapear\1
occurred => occured
argument => arguement
calendar => calender
cemetery => cemetary
advice => advise / advize
pronunciation => pronounciation
independent => independant
privilege => priviledge
delicious => delicius / delicous
dangerous => dangerouse / dangerus
famous => famouse / famus
nervous => nervouse / nervus
serious => serius / seriouse
jealous => jelous
delighted => delited
favorite => favorit / favourit
chocolate => chocolat / choclate
vegetables => vegtables / vegetabels
hospital => hospitel / ospital
library => libary / librery
kitchen => kitchin / kichen
umbrella => umbrela / ombrella
mountain(s?) => montain\1 / mountin\1
machine => mashine / maschine
minute(s?) => minut\1
answer(ed)? => anser\1 / awnser\1
question(s?) => qestion\1 / cuestion\1
promise(d?) => promisse\1
suggest(ed)? => sugest\1
decide(d?) => deside\1
explain(ed)? => explane\1 / explaine\1
remember(ed)? => remenber\1 / rember\1
understand => understend / undestand
please => pleas / plese / pleace
excuse => exuse / excuce
speech => speach
truth => thruth / truht
money => mony / monney
children => childern / childeren / chidren
country => contry / countrie
house => hause / hous
clothes => cloths / clotes
""",
)

APART = Table(
    "Words are written together or apart.",
    r"""
a lot => alot
cannot => can not
maybe => may be
someone => some one
everyone => every one
everything => every thing
something => some thing / somthing / sometthing
anything => any thing
nothing => no thing
sometimes => some times / sometime
into => in to
inside => in side
outside => out side
each other => eachother
in front of => infront of
of course => ofcourse / off course
at least => atleast
all right => allright / alright
as well => aswell
no one => noone / no-one
even though => eventhough
in fact => infact
every day => everyday
thank you => thankyou / thank's you
high school => highschool
ice cream => icecream
post office => postoffice
bedroom => bed room
newspaper(s?) => news paper\1
homework => home work / home-work
birthday => birth day
myself => my self
himself => him self
weekend => week end / week-end
afternoon => after noon
football => foot ball
boyfriend => boy friend
girlfriend => girl friend
grandfather => grand father
grandmother => grand mother
airport => air port
another => an other
however => how ever
whenever => when ever
already => all ready
going to => gonna / goingto
want to => wanna
don't know => dunno / don't now / dont no
because => cause / cuz
please => pls / plz
your => ur
""",
)

PUNCTUATION = Table(
    "A comma or an apostrophe is missing where there must be one, or has the wrong place.",
    r"""
(yes|no|well|sorry|hello|hi|thanks|oh), (\w+) => \1 \2
(\w+), (isn't|aren't|don't|doesn't|didn't|wasn't|won't|can't|is|are|do|does|did|will|have) (it|you|he|she|they|we) => \1 \2 \3
(if|when|although|because|after|before|while) (.{6,40}), => \1 \2
(\w+), (\w+),? and => \1 \2 and
(Tom|Mary), => \1
(\w+), (but|so|and|because|Tom|Mary|please) => \1 \2 / \1 , \2 / \1,\2
(\w+), => \1 , / \1.
don't => dont / don´t / do'nt
doesn't => doesnt / does'nt / dosen't
didn't => didnt / did'nt
can't => cant / can´t
won't => wont
isn't => isnt / is'nt
I'm => Im / i'm / im
I've => Ive / I'v
I'll => Ill / i'll
it's => its / it´s
that's => thats
there's => theres
what's => whats
let's => lets
you're => youre / your
we're => were / we´re
they're => theyre / their / there
he's => hes
she's => shes
who's => whos / whose
Tom's => Toms / Tom´s
""",
)

TITLES = (
    "english french german spanish italian chinese japanese american european monday tuesday "
    "wednesday thursday friday saturday sunday january february april june july august september "
    "october november december christmas easter boston australia germany japan france london paris "
    "england america europe italy spain china canada"
).split()


def lower_title(text: str, rng: random.Random, lexicon: Lexicon) -> str | None:
    """Write the name of a language, a day, a month or a country, or `I`, in lower case."""
    names = "|".join(name.capitalize() for name in TITLES)
    places = list(re.finditer(rf"\b({names}|I(?=['\s]))", text))
    if not places:
        return None
    found = rng.choice(places)
    return text[: found.start()] + found[0].lower() + text[found.end() :]


def upper_noun(text: str, rng: random.Random, lexicon: Lexicon) -> str | None:
    """Write a noun after an article or a possessive with a capital, as German does."""
    places = list(re.finditer(r"\b(?:the|my|his|her|our|your|a) ([a-z]{3,})\b(?=[.?!,])", text))
    if not places:
        return None
    found = rng.choice(places)
    return text[: found.start(1)] + found[1].capitalize() + text[found.end(1) :]


SOUNDS = [
    ("ph", "f"), ("ie", "ei"), ("ei", "ie"), ("gh", "hg"), ("ght", "gth"), ("ll", "l"),
    ("tt", "t"), ("ss", "s"), ("pp", "p"), ("nn", "n"), ("mm", "m"), ("rr", "r"), ("cc", "c"),
    ("ff", "f"), ("dd", "d"), ("kn", "n"), ("wr", "r"), ("wh", "w"), ("ea", "ee"), ("ee", "ea"),
    ("ou", "u"), ("ck", "k"), ("sh", "ch"), ("tion", "sion"), ("able", "ible"), ("ance", "ence"),
    ("ence", "ance"), ("ful", "full"), ("ely", "ly"), ("qu", "kw"), ("sc", "s"), ("x", "ks"),
    ("ant", "ent"), ("ent", "ant"), ("er", "ar"), ("or", "er"), ("au", "ou"), ("i", "e"),
    ("e", "i"), ("a", "e"), ("th", "t"), ("y", "i"),
]  # fmt: skip


def by_ear(text: str, rng: random.Random, lexicon: Lexicon) -> str | None:
    """Spell a longer word with other letters for one of its sounds."""
    words = [w for w in re.finditer(r"\b[A-Za-z][a-z]{4,}\b", text)]
    if not words:
        return None
    found = rng.choice(words)
    word = found[0]
    places = [
        word[:i] + new + word[i + len(old) :]
        for old, new in SOUNDS
        for i in range(1, len(word))
        if word.startswith(old, i)
    ]
    if word.lower() not in lexicon.words or not places:
        return None
    wrong = rng.choice(places)
    # Another word would be no misspelling.
    return None if wrong.lower() in lexicon.words else replace(text, found, wrong)


def question_stop(text: str, rng: random.Random, lexicon: Lexicon) -> str | None:
    """End a question with a full stop, or with nothing."""
    if not text.endswith("?"):
        return None
    return text[:-1] + rng.choice([".", "", " ?"])


RULES: tuple[Rule, ...] = (
    MISSPELT, MISSPELT, APART, PUNCTUATION, lower_title, upper_noun, by_ear, question_stop,
)  # fmt: skip
