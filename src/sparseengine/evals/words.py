"""Word lists of the generated tasks."""

# ruff: noqa: SIM905

from __future__ import annotations

ADJECTIVES = tuple(
    "able amber ancient autumn bitter bold brave brief bright broad calm careful cheap clear "
    "clever cloudy cold copper crisp curious damp dark deep distant double dry dusty eager early "
    "easy empty equal exact fair faint famous fancy fast fierce final firm flat fresh gentle "
    "giant glad golden grand grave green grey half happy hard heavy hidden hollow honest hot huge "
    "humble idle inner iron jolly keen kind large late lazy light little lively local lonely long "
    "loud lucky mellow mild modest narrow nearby neat noble northern odd old open outer pale "
    "patient plain polite proud public purple quick quiet rapid rare ready red rich rough round "
    "rural sharp shy silent silver simple slow small smooth soft solid southern spare steady "
    "steep stiff still strange strict strong sudden sunny sweet swift tall tame tender thick thin "
    "tidy tiny tired tough upper useful vague vast warm weary western white wide wild windy wise "
    "wooden young".split()
)
NOUNS = tuple(
    "acorn anchor anvil apron arrow badge barrel basin basket beacon beam bench blanket boat bolt "
    "bottle bowl branch brick bridge broom brush bucket button cabin cable camel candle canoe "
    "carpet castle cedar chain chair chalk cherry chest cliff clock cloud coat coin comet compass "
    "coral cotton cradle crane crown curtain dagger desert desk dome donkey door drum eagle "
    "engine falcon farm feather fence ferry field flag flame flute forest fork fountain fox "
    "garden gate glacier glass globe glove goose grain hammer harbor harp hawk hedge helmet heron "
    "hill hook horn horse island jacket jar jewel kettle key kite ladder lake lamp lantern leaf "
    "lemon lens letter lily lion lock loom magnet maple marble market mask meadow mill mirror "
    "mitten moon mountain nest needle oak oar olive orchard otter owl oyster paddle palace panel "
    "parcel path peach pearl pebble pencil piano pillow pine pocket pond puzzle quarry quilt "
    "rabbit raft rail raven reef ribbon ring river robin rocket roof rope saddle sail salmon "
    "scarf shell shelf ship shovel sparrow spoon spring star stone stove table tent thread tiger "
    "torch tower trail train tunnel turtle valley vase violin wagon wall walnut well whale wheel "
    "whistle willow window wolf".split()
)
FIRST_NAMES = tuple(
    "Ada Aldo Alma Anton Astrid Bruno Carla Cesar Clara Cyril Dalia Dario Edith Elias Elsa Emil "
    "Erik Esther Fabio Felix Flora Frida Gustav Hana Hector Helga Hugo Ida Igor Ines Irma Ivan "
    "Jonas Julia Karin Klaus Lara Leon Lidia Linus Luca Magda Marek Marta Milo Nadia Nils Nina "
    "Olga Omar Oscar Petra Quentin Rafael Rita Rosa Ruben Sara Selma Simon Sonia Stella Sven "
    "Tamara Theo Tilda Ulla Ursula Vera Victor Wanda Willem Xenia Yannick Yvonne Zeno Zora".split()
)
LAST_NAMES = tuple(
    "Abel Adler Almeida Andersen Bakker Baran Becker Bergman Blom Borg Brandt Castro Conti Costa "
    "Dahl Dekker Duarte Ekman Engel Faber Falk Ferrara Fischer Fontana Gallo Garcia Gruber Haas "
    "Hansen Hoffman Holm Ivanov Jansen Jensen Jung Kaplan Keller Koch Kovac Kruger Lang Larsen "
    "Lind Lopez Lund Maier Marino Meyer Moreau Moretti Nagy Navarro Novak Nyberg Olsen Ortega "
    "Peeters Petrov Pinto Popov Ramos Reyes Ricci Romano Rossi Sala Santos Schmidt Serra Silva "
    "Simic Soto Stein Strand Torres Urban Vargas Varga Visser Vogel Wagner Weber Winter Wolff "
    "Zeller Zimmer".split()
)
CITIES = tuple(
    "Aarhus Bergen Bilbao Bologna Bordeaux Bremen Brno Cadiz Cork Debrecen Dundee Espoo Fano "
    "Gdansk Geneva Ghent Graz Haarlem Innsbruck Kiel Kosice Krakow Leeds Leipzig Linz Lodz Lublin "
    "Lucerne Malmo Maribor Mainz Nantes Narvik Odense Oulu Parma Pecs Pilsen Porto Rennes Riga "
    "Seville Sibiu Split Szeged Tampere Tartu Toledo Trento Trieste Turku Utrecht Varna Verona "
    "Vigo Zadar".split()
)
JOBS = tuple(
    "baker barber beekeeper blacksmith botanist bricklayer butcher carpenter chemist cobbler cook "
    "dentist diver draper editor fisher florist forester gardener geologist glazier goldsmith "
    "grocer guide hatter jeweller joiner judge lawyer librarian locksmith mason mechanic miller "
    "miner nurse painter pharmacist pilot plumber porter potter printer roofer sailor saddler "
    "shepherd surgeon surveyor tailor tanner teacher translator weaver welder".split()
)
INSTRUMENTS = tuple(
    "accordion bagpipe banjo bassoon bugle cello clarinet cornet drum dulcimer fiddle flute "
    "guitar harmonica harp harpsichord horn lute lyre mandolin oboe organ piano piccolo recorder "
    "saxophone sitar tambourine trombone trumpet tuba ukulele viola violin xylophone zither".split()
)
