"""The words that are drawn as text: common, short, and some of them kept for tests. And the
numbers as every task says them."""

from __future__ import annotations

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

_COMMON = """
able about above act add after again age ago agree ahead aid aim air all allow almost alone along
already also always am amber among amount an and angle angry animal ankle annual answer any apart
apple apply april apron arch arctic are area arena arm army around arrive arrow art as ask asleep
at atlas atom attic august aunt author autumn avenue avoid awake award away axis baby back bacon
badge bag bake baker bakery balance ball ballet bamboo banana band bank banner bar bare bark barn
barrel base basic basil basket bat bath bay be beach bead beam bean bear beard beat beauty became
because become bed bedroom bee beef been before began begin behind being believe bell belong below
belt bench bend berry beside best better between beyond bicycle big bike bird birth biscuit bit
black blade blank blanket blaze blend blind block blossom blow blue board boat body boil bold bolt
bone bonus book boot border born both bottle bottom bounce bow bowl box boy brain branch brass
brave bread break breath breeze brick bridge bright bring broad broken bronze brook broom brother
brown brush bubble bucket bud budget build bulb bull bundle bus bush busy but butter button buy by
cabin cable cactus cafe cage cake call calm came camel camera camp can canal candle candy canoe
canvas cap cape capital captain car caramel card care careful cargo carpet carrot carry cart
carve case castle cat catch cattle cause cave ceiling celery cell cellar cello cement center cereal
chain chair chalk chance change chapel charm chart chase cheap check cheek cheer cheese cherry
chess chest chicken chief child chimney chin choice choose chorus circle circus city claim class
clay clean clear clerk clever click cliff climate climb clock close cloth cloud clover clown club
coach coal coast coat cobalt cocoa coconut code coffee coin cold collar collect colour comb come
comedy comet comfort comic common compass concert cook cookie cool copper copy coral cord core
corn corner correct cost cottage cotton couch could council count country couple course court
cousin cover cow crab craft crane crayon cream create creek crew cricket crisp crop cross crowd
crown crumb crust cry crystal cube cup curious current curry curtain curve cushion custom cut
cycle daily dairy daisy dam damp dance danger dare dark data date dawn day deal dear decade decide
deck deep deer degree delay dentist depend depth desert desk detail dial diamond diary did differ
digital dinner direct dish dive divide do doctor dog doll dollar dolphin dome done donkey door dot
double dough dove down dozen draft dragon draw drawer dream dress drift drink drive drop drum dry
duck due dune dust duty each eager eagle ear early earn earth easel east easy eat echo edge edit
effect effort egg eight either elbow elder eleven elm else ember empire empty end energy engine
enjoy enough enter entire entry envy equal error escape estate even evening event ever every exact
exam example expert extra eye fabric face fact factory fair faith fall false fame family famous
fancy far farm farmer fashion fast father favour feast feather feel feet fellow fence fern ferry
festive few fiber fiddle field fig figure file fill film final find fine finger finish fire firm
first fish fit five fix flag flame flash flat flavour flight float flock floor flour flow flower
flute fly foam fog fold folk follow food foot for forest forget fork form fort forward fossil found
fountain four fox frame free freeze fresh friday friend frog from front frost fruit fuel full fun
funny fur future galaxy game garage garden garlic gas gate gather gave gentle get ghost giant gift
ginger giraffe girl give glad glass globe glove glow glue go goal goat gold golden good goose grace
grade grain grand granite grape graph grass gravel great green greet grey grid grin grip ground
group grow guard guess guest guide guitar gulf gym habit had hair half hall hammer hand handle
happen happy harbor hard harp harvest has hat have hawk hay hazel he head health hear heart heat
heaven heavy hedge height hello helmet help hen her herb here hero heron hidden high hill him hint
his history hive hobby hold hole holiday hollow home honest honey hood hook hope horizon horn horse
hot hotel hour house how huge human humble hundred hunger hurry hut ice icon idea if igloo image in
inch indeed indigo indoor ink inner insect inside invite iris iron island it item its ivory ivy
jacket jade jam january jar jaw jazz jelly jewel job join joke jolly journal journey joy judge jug
juice july jump june jungle junior jury just kayak keen keep kettle key kick kind king kingdom kiosk
kitchen kite kitten kiwi knee knew knife knight knock knot know koala label labor lace ladder lady
lake lamb lamp land lane lantern lap large laser last late laugh laundry lava lawn lawyer lay layer
lazy lead leaf league learn least leather leave left leg legend lemon lend lens less lesson let
letter level lever liberty library lid life lift light like lilac lily lime limit line linen lion
lip liquid list listen little live lizard load loaf lobby local lock log lonely long look loop loose
lord lose lotus loud lounge love low loyal lucky lunar lunch lung lyric machine made magic magnet
mail main major make mammal man manage mango manner many map maple marble march margin marina mark
market marsh mask master match math matter may maybe mayor me meadow meal mean measure meat medal
medium meet melody melon member memory men mention menu merit merry message metal meteor meter
method middle might mile milk mill mind mine mineral minor mint minute mirror miss mist mix mixture
model modern moment monday money monkey month mood moon more morning mosaic moss most moth mother
motion motor mount mouse mouth move movie much mud muffin mug muscle museum music must my mystery
nail name napkin narrow nation native nature navy near neat neck need needle nephew nerve nest net
never new news next nice nickel niece night nine no noble nobody noise none noodle noon nor normal
north nose not note nothing notice novel now number nurse nut nylon oak oar oasis oat object ocean
october odd of off offer office often oil old olive on once one onion only onto opal open opera
option or orange orbit orchard orchid order organ other otter our out outdoor outside oval oven
over owl own owner oxygen oyster pace pack page paint pair palace pale palm pan panda panel paper
parade parcel parent park parrot part partner party pass past pasta paste pastry patch path patient
pattern pause paw pay pea peace peach peak peanut pear pearl pebble pedal pen pencil penguin people
pepper perfect perfume perhaps person petal phone photo phrase piano pick picnic picture pie piece
pigeon pile pillow pilot pin pine pink pioneer pipe pirate pitch pizza place plain plan planet plank
plant plastic plate play player plaza please plenty plot plow plum plus pocket poem poet point polar
pole police polish polite pond pony pool poor popcorn poppy popular porch port portion post postage
pot potato pottery pour powder power praise prepare present press pretty price pride prince print
prism prize problem process produce product profit program project promise proof proper protect
proud provide public pudding pull pulse pumpkin pupil puppet puppy pure purple purpose purse push
put puzzle pyramid quality quarter quartz queen quest quick quiet quilt quite quiz quote rabbit
race rack radar radio raft rail railway rain rainbow raise ranch random range rapid rare rather
raven raw ray reach read ready real reason receive recipe record red reed reef region relax rely
remain remark remote rent repair repeat reply report rescue rest result return reward rhythm ribbon
rice rich ride ridge right ring ripe ripple rise river road roast robe robin robot rock rocket role
roll roof room root rope rose rotate rough round route row royal rubber ruby rug rule run runner
rural rush rust saddle safari safe saffron said sail sailor salad salmon salon salt same sample
sand sandal satin sauce saucer sauna save say scale scarf scarlet scene scent school science score
scout scroll sea seal search season seat second secret section see seed seem seldom select self
sell send senior sense sentence serve set seven several shade shadow shake shall shallow shape
share shark sharp she shed sheep sheet shelf shell sheriff shield shift shine ship shirt shoe shop
shore short should show shower shrimp side sight sign signal silence silent silk silly silver
simple since sing singer single sink sister sit six size skate sketch ski skill skin skirt sky
slate sled sleep sleeve slice slide slim slope slow small smart smell smile smoke smooth snack
snail snake snow so soap soccer social sock soda sofa soft soil solar solid solve some son song
soon sound soup source south space spark sparrow speak special speech speed spell spend sphere
spice spider spin spinach spiral splash spoon sport spot spread spring spruce square squash stable
stack stadium staff stage stair stamp stand star start state station statue stay steady steam
steel stem step stereo stick still stir stock stone stool stop store storm story stove strange
straw stream street string strong student studio study style subject sudden sugar suit summer sun
sunday sunny sunrise sunset supper supply support sure surface surprise swallow swan sweater sweet
swift swim swing switch symbol syrup system table tablet tail take tale talent talk tall tank tape
target task taste taxi tea teach teacher team tell temple ten tennis tent term test text thank that
the theater their them then theory there they thick thin thing think third thirty this thread three
throne through thumb thunder ticket tide tidy tie tiger tile till timber time tin tiny tip tire
title to toast today toe together tomato tone tongue tonight too took tool tooth top topic torch
total touch toward towel tower town toy track trade traffic trail train travel tray treasure treat
tree trend triangle tribe trick trip tropic trophy trouble truck true trumpet trunk trust truth try
tube tuesday tulip tuna tune tunnel turkey turn turtle tutor twelve twenty twice twin twist two
type umbrella uncle under uniform union unique unit unity until up upon upper urban us use useful
usual vacuum valley value van vanilla vapor vase vast vault velvet venture verb verse very vessel
video view village vine vinegar violet violin visit visitor vital vivid vocal voice volcano volume
vote vowel voyage wage wagon waist wait wake walk wall wallet walnut walrus want warm was wash wasp
watch water wave wax way we wealth wear weather weave wedding week weekend weight welcome well west
wet whale wheat wheel when where which while whisper whistle white who whole why wide width wild
will willow win wind window wine wing winner winter wire wisdom wise wish with wizard wolf wonder
wood wool word work world worth wrap wren wrist write writer wrong yard yarn year yellow yes yet
yogurt yolk you young your youth zebra zero zone zoo
"""
LETTERS = range(2, 8)  # as many as a word may have

_ALL = sorted({word for word in _COMMON.split() if len(word) in LETTERS})
KEPT = tuple(_ALL[5::6])  # a sixth, evenly through the alphabet
LEARNED = tuple(word for word in _ALL if word not in set(KEPT))
