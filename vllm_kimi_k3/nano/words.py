"""The small English of the miniature: every word its generated dialogues are made of, by what it is used for."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Anna Ben Carla David Emma Felix Grace Henry Ida Jonas Karen Leo Maria Nina Oscar Paul Rosa Simon Tina Victor "
    "Alice Bruno Clara Dora Erik Frank Greta Hugo Iris Jack Kira Luis Mona Noah Olga Peter Ruth Sara Tom Vera"
)
CITIES = _words(
    "Rome Oslo Paris London Berlin Madrid Lisbon Vienna Prague Dublin Athens Cairo Delhi Tokyo Seoul Lima Boston "
    "Denver Dallas Miami Zurich Geneva Milan Turin"
)
COLOURS = _words("red blue green yellow black white brown grey pink purple orange silver")
ANIMALS = _words("cat dog horse cow sheep goat bird fish mouse lion tiger bear wolf fox duck frog snake bee owl rabbit")
FRUITS = _words("apple pear plum cherry grape lemon melon peach mango banana fig olive")
OBJECTS = _words(
    "book lamp chair table bag box cup key door clock phone ring hat coat shoe pen map coin bottle knife spoon plate "
    "mirror basket blanket candle ladder hammer piano guitar"
)
THINGS = _words("apples pears coins books cups maps pens rings lamps keys")
PLACES = _words("kitchen garden office school library market station bridge park museum harbour farm forest tower")
VERBS = _words("paint clean buy sell bring carry open close find fix move check sort pack send read")
WEEKDAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
SKIES = _words("sunny cloudy rainy windy foggy snowy clear")
ADJECTIVES = _words("old new small big heavy light quiet loud warm cold bright dark happy busy slow fast")
IDENTIFIERS = _words("x y n i total count name value item row data left right index key size line user")
