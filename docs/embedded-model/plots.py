"""The plots that the story grammar can tell, beat by beat.

Every beat is a tuple of wordings of the same event, so any choice leads to a story that holds
together. `{h}` is the hero, `{f}` the friend and `{o}` the helper; `[one|other]` is a choice.
A capital first letter in a slot asks for a capital. Only the texts live here; `stories` picks the
characters and fills the slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_ANYWHERE = ("town", "castle", "wild", "farm", "plain", "snow")
_GREEN = ("town", "castle", "wild", "farm")


@dataclass(frozen=True)
class Plot:
    """One plot: where it can happen, what it is about, and its beats in order.

    `direct` are wordings of the first beat for stories that open in the middle of the action,
    where the introduction has already said where the hero is.
    """

    name: str
    lands: tuple[str, ...]
    topics: tuple[str, ...]
    direct: tuple[str, ...]
    beats: tuple[tuple[str, ...], ...]
    extra: dict[str, tuple[str, ...]] = field(default_factory=dict)


LOST_THING = Plot(
    name="lost thing",
    lands=_ANYWHERE,
    topics=("{a_thing}", "a lost {thing}", "losing something", "a good friend"),
    direct=(
        "{H.he} had {a_thing} that {h.he} loved very much. On the way home, {h.he} saw that the {thing} was gone.",
        "Suddenly, {h.he} stopped. {H.his} {thing} was gone!",
    ),
    beats=(
        (
            "{H} had {a_thing} that {h.he} loved very much. {lead} {h.he} looked for the {thing}, but it was gone.",
            "{H.his} favorite thing in the whole world was {a_thing}. {lead} {h} took the {thing} "
            "{p.to}, and on the way home {h.he} saw that it was gone.",
            "{H} never went anywhere without {h.his} {thing}. {lead} {h.he} woke up and could not find it.",
            "{lead} {h} got {a_thing} from {h.his} grandmother. {H.he} showed it to everyone, but "
            "in the evening the {thing} was gone.",
        ),
        (
            "{H} was very sad.",
            "{H} was so sad that {h.he} began to cry.",
            '"Oh no!" cried {h}. "Where is my {thing}?"',
            '"I can\'t find my {thing}," said {h} with tears in {h.his} eyes.',
        ),
        (
            "{H.he} looked {p2.at} and {p3.at}, but the {thing} was not there.",
            "First {h.he} looked {p2.at}. Then {h.he} looked {p3.at}. It was not there.",
            "{H.he} went back {p2.to} and looked [everywhere|all around], but {h.he} found nothing.",
            "{H.he} searched for a long time, but {h.he} could not find it.",
        ),
        (
            'Then {f.first} came by. "Do not [cry|worry]," said {f}. "I will help you [look|search]."',
            '{F} saw that {h} was sad. "What is wrong?" asked {f}. "I lost my {thing}," said {h}. '
            '"Then let us look for it together," said {f}.',
            "{F.first} heard about it and [came|ran] to help.",
            'Just then {h.he} met {f.intro}. "Can you help me find my {thing}?" asked {h}. "Of course," said {f}.',
        ),
        (
            "Together they looked [for a long time|everywhere|very carefully].",
            "The two friends walked {p3.to} and looked [everywhere|again].",
            "They looked high and low and did not give up.",
            "",
        ),
        (
            "At last, {f} saw something {spot}. It was the {thing}!",
            "And there it was! The {thing} was lying {spot}.",
            'Suddenly {f} called, "Look!" The {thing} was {spot}.',
            "After a while, they found the {thing} {spot}.",
        ),
        (
            '{H} [jumped for joy|was very happy]. "Thank you, {f.call}!" {h.he} said. "You are a '
            '[good|true|wonderful] friend."',
            "{H} hugged {f} and smiled. [Losing the {thing} was sad, but|Now {h} knew that] a good "
            "friend is worth more than any {thing}.",
            "{H} was so happy that {h.he} danced around {f}. From that day on, {h.he} always kept "
            "the {thing} in a safe place.",
            "{H} thanked {f}, and they [played|laughed] together until the sun went down.",
        ),
    ),
)

LEARNING = Plot(
    name="learning",
    lands=_GREEN,
    topics=("learning to {skill}", "learning something new", "not giving up"),
    direct=(
        "{H.he} saw {f.intro}, who could {skill} very well. {H} wanted to {skill} too.",
        "{H.he} had one big wish. {H.he} wanted to {skill}.",
    ),
    extra={
        "skill": (
            "swim",
            "whistle",
            "dance",
            "paint",
            "bake bread",
            "fly a kite",
            "play the drum",
            "play the flute",
            "climb trees",
            "skate",
            "read",
            "count to one hundred",
            "write a letter",
            "build a boat",
            "juggle",
            "sing a song",
        )
    },
    beats=(
        (
            "{H} had one big wish. {H.he} wanted to learn to {skill}.",
            "More than anything, {h} wanted to {skill}.",
            "{lead} {h} saw {f.intro}, who could {skill} very well. {H} wanted to {skill} too.",
            'All the friends of {h} could {skill}, but {h} could not. "I want to learn it," {h.he} said.',
        ),
        (
            "{H.he} tried [once|again and again], but it did not work.",
            "{H.he} tried all morning, but it was very hard.",
            "The first time {h.he} tried, everything went wrong, and {h.he} felt like giving up.",
            '{H.he} tried and tried, but {h.he} could not do it. "I will never learn to {skill}," {h.he} said sadly.',
        ),
        (
            "{O} watched {h.him} for a while and came closer.",
            "Then {h.he} met {o.intro} {p.at}.",
            "{H} went to {o} and asked for help.",
            "{O} saw {h.his} sad face and sat down next to {h.him}.",
        ),
        (
            '"You do not have to learn it in one day," said {o}. "[Try a little every day|Take it slowly]."',
            '"Nobody can {skill} the first time," said {o}. "Let me show you how to begin."',
            '"I will tell you a secret," said {o}. "I needed a whole year to learn it."',
            '"Do not give up," said {o}. "Every mistake teaches you something."',
        ),
        (
            "So {h} practiced every day, in the sun and in the [rain|wind].",
            "{H} listened carefully and tried again, slowly this time.",
            "Every morning {h} went {p2.to} and practiced. Each day it was a little easier.",
            "{H} took a deep breath and tried once more. It was a little better than before.",
        ),
        (
            "After a week, {h} could {skill}!",
            "And one day it worked. {H} could {skill}!",
            "At last {h.he} could do it. Everyone clapped and cheered.",
            'Soon {h.he} could {skill} better than anyone. "I did it!" {h} shouted.',
        ),
        (
            '{H} was very proud, and {h.he} never said "I can\'t" again.',
            "{H} learned that you can do hard things if you do not give up.",
            "{H.he} thanked {o} with a big [smile|hug]. Now {h} helps others who want to learn.",
            "{H} smiled all day long. It is good to keep trying.",
        ),
    ),
)

RESCUE = Plot(
    name="rescue",
    lands=("town", "castle", "wild", "farm"),
    topics=("helping others", "a rescue", "a small bird", "being kind"),
    direct=(
        'Suddenly {h.he} heard a small voice. "[Help me|Please help]," it said. {A_victim} was {trap}.',
        "Then {h.he} saw {a_victim}. It was {trap} and could not get out.",
    ),
    extra={
        "victim": (
            "small bird",
            "baby bird",
            "little beetle",
            "little duckling",
            "tiny mouse",
            "young rabbit",
            "little butterfly",
            "small kitten",
        ),
        "trap": (
            "stuck in the mud",
            "stuck in a thorn bush",
            "caught in an old net",
            "trapped under a branch",
            "trapped in a deep hole",
            "caught between two stones",
        ),
    },
    beats=(
        (
            "{lead} {h} went {p.to}. There {h.he} saw {a_victim} that was {trap}.",
            '{lead} {h} was walking {p.to} when {h.he} heard a small voice. "[Help me|Please '
            'help]!" it said. {A_victim} was {trap}.',
            "{lead} {h} heard someone crying. {H.he} followed the sound and found {a_victim}. It was {trap}.",
            "{lead} on the way {p.to}, {h} found {a_victim}. It was {trap} and could not get out.",
        ),
        (
            '"Do not be afraid," said {h}. "I will help you."',
            "{H} wanted to help right away.",
            "{H} felt sorry for the little animal.",
            '"Poor little thing," said {h}. "I will get you out."',
        ),
        (
            "{H.he} pulled and pulled, but {h.he} was not strong enough.",
            "{H.he} tried to help, but {h.he} could not do it alone.",
            "{H.he} tried [three times|with all {h.his} strength], but it did not work.",
            "{H.he} used a long stick, but the stick broke.",
        ),
        (
            'So {h} ran to {f.first}. "Come quickly!" {h.he} said.',
            'Then {f} came along the path. "Let us do it together," said {f}.',
            "{H} called {f.first}, who came as fast as possible.",
            "Luckily, {f.intro} was near and heard the noise. {F} came to help.",
        ),
        (
            "Together they [pulled|worked] very carefully. One, two, three, and the {victim} was free!",
            "{F} had a good idea. They brought a strong rope, and soon the {victim} was free.",
            "With two friends, it was much easier. Soon the {victim} was free.",
            "Slowly and gently, they got the {victim} out.",
        ),
        (
            '"Thank you," said the {victim}. "You are very kind."',
            "The {victim} was [happy|safe] and thanked them both.",
            "They gave the {victim} some water, and soon it felt better.",
            'The {victim} looked at {h}. "I will never forget this," it said.',
        ),
        (
            "From that day on, they were all good friends.",
            "{H} and {f} went home with a warm feeling in their hearts. It is good to help someone who is small.",
            "{H} learned that two friends can do more than one.",
            "Every day after that, the {victim} came to visit {h} and {f}.",
        ),
    ),
)

SHARING = Plot(
    name="sharing",
    lands=_ANYWHERE,
    topics=("sharing", "{a_food}", "being kind"),
    direct=(
        "{H.he} had {a_food} with {h.him} and wanted to eat it all alone.",
        "{H.he} was carrying {a_food}. It smelled so good!",
    ),
    beats=(
        (
            "{lead} {h} found {a_food} {p.at}. {H.he} was very happy.",
            "{lead} {h.his} grandmother gave {h.him} {a_food}. It smelled so good!",
            "{lead} {h} wanted to have a picnic {p.at}. {H.he} took {a_food} along.",
            "{lead} {h} got {a_food} as a present. {H.he} carried it {p.to}.",
        ),
        (
            "On the way, {h} met {f.first}. {F} looked hungry and sad.",
            "There {h.he} met {f.intro} who had nothing to eat.",
            'Then {f.intro} came along. "I am so hungry," said {f}. "I have not eaten all day."',
            "{F.first} was sitting {p2.at}. {F} had nothing to eat.",
        ),
        (
            '"This is mine," thought {h}. "I do not want to share it."',
            "At first, {h} wanted to keep everything for {h.self}.",
            "{H} hid the {food} behind {h.his} back.",
            '"If I share it, there will be less for me," thought {h}.',
        ),
        (
            "But then {h.he} looked at {f} and felt sorry.",
            "But then {h.he} thought about how it feels to be hungry.",
            "But eating alone was no fun at all.",
            "But then {h.he} remembered that {f} had always been good to {h.him}.",
        ),
        (
            '"Come and sit with me," said {h}. "There is enough for both of us."',
            'So {h} smiled and said, "Here, {f.call}. Half of it is for you."',
            '"Would you like some?" asked {h}. "Oh yes, please!" said {f}.',
            "So {h} shared the {food} with {f}.",
        ),
        (
            "They sat {p3.at} and ate together. It tasted better than ever.",
            "They ate and talked and laughed.",
            "{F} was so happy that {f.he} [sang a little song|told a funny story].",
            'They ate every bit. "That was the best meal of my life," said {f}.',
        ),
        (
            "{H} learned that good things are even better when you share them.",
            "The next day, {f} came back with a basket of fresh fruit for {h}. From then on, they shared everything.",
            "From that day on, {h} and {f} were best friends.",
            "That evening {h} went home with a happy heart.",
        ),
    ),
)

AFRAID = Plot(
    name="afraid",
    lands=("town", "castle", "wild", "farm", "plain"),
    topics=("being brave", "the dark", "being afraid", "a dark night"),
    direct=(
        "When the sun went down, {h.he} became quiet. {H.he} was afraid of the dark.",
        "Then the sky became dark. {H} was afraid and ran home.",
    ),
    extra={
        "sound": (
            "the wind in the leaves",
            "the rain on the roof",
            "an owl that was looking for its supper",
            "a branch that was moving in the wind",
            "a mouse that was looking for crumbs",
        )
    },
    beats=(
        (
            "{H} was afraid of the dark. Every evening, when the sun went down, {h.he} hid under {h.his} blanket.",
            "{H} was brave during the day, but at night {h.he} was afraid.",
            "There was only one thing that {h} did not like. {H.he} was afraid of the dark.",
            "One night, {h} could not sleep. It was very dark, and {h.he} was afraid.",
        ),
        (
            "That night {h.he} heard a strange sound. [Tap, tap, tap|Swish, swish|Scratch, scratch].",
            "Then {h.he} heard a noise outside.",
            "Suddenly something made a noise in the dark.",
            "All at once there was a strange noise. {H} did not dare to move.",
        ),
        (
            '"Who is there?" whispered {h}. Nobody answered.',
            "{H.his} heart beat fast. {H.he} closed {h.his} eyes.",
            '"Is it a monster?" {h.he} thought.',
            "{H} pulled the blanket over {h.his} head.",
        ),
        (
            '{H.he} called for help, and {o} came with a small light. "What is wrong?" asked {o}.',
            "Then {o} came and sat down next to {h.him}.",
            '"I am afraid," said {h}. {O} came close and listened too.',
            "In the morning, {h} told {o} about it. The next night they waited together, and "
            "there was the noise again.",
        ),
        (
            '"Let us see what it is," said {o}. They went outside and looked. It was only {sound}.',
            '"Listen again," said {o}. {H} listened. It was only {sound}!',
            'They took a lantern and looked around. "See?" said {o}. "It is only {sound}."',
            "Together they opened the door. They saw {sound}. That was all!",
        ),
        (
            "{H} looked up and saw the moon and a thousand stars. The night was beautiful.",
            '{H} laughed. "I was afraid of such a small thing," {h.he} said.',
            '"Being brave does not mean that you are never afraid," said {o}. "It means that you look anyway."',
            "{H} began to laugh, and {o} laughed too.",
        ),
        (
            "From then on, {h} was not afraid of the dark anymore.",
            "That night {h} slept very well.",
            "Since that night, {h} likes to look at the stars before {h.he} goes to sleep.",
            "{H} went back to bed, closed {h.his} eyes and had a sweet dream.",
        ),
    ),
)

LOST_WAY = Plot(
    name="lost way",
    lands=_ANYWHERE,
    topics=("getting lost", "finding the way home", "an adventure"),
    direct=(
        "{H.he} followed a [butterfly|little bird] and went too far. When {h.he} looked around, "
        "nothing looked familiar.",
        "{H.he} walked on and on without thinking. Soon {h.he} did not know where {h.he} was.",
    ),
    beats=(
        (
            "{lead} {h} wanted to see what was behind the hills. {H.he} walked and walked until "
            "{h.he} did not know where {h.he} was.",
            "{lead} {h} followed a [butterfly|little bird] and went too far. When {h.he} looked "
            "around, nothing looked familiar.",
            "{lead} {h} went for a long walk alone. Soon there was thick fog, and {h.he} lost {h.his} way.",
            "{lead} {h} went {p.to} without telling anyone. On the way back, {h.he} took the wrong path.",
        ),
        (
            "{H.he} went left and right, but {h.he} could not find the way.",
            "It was getting dark, and {h} was [cold|tired|hungry] and afraid.",
            '"I am lost," {h.he} said, and {h.his} voice was very small.',
            "{H.he} climbed on a stone and looked around, but {h.he} could not see {h.his} home.",
        ),
        (
            "Then {h.he} met {f.intro}.",
            "Just then, {f.intro} came along the path.",
            "After a while, {h.he} saw {f.intro} {p2.at}.",
            "Behind a big rock, {h.he} found {f.intro}.",
        ),
        (
            '"Why are you so sad?" asked {f}. "I can\'t find my way home," said {h}.',
            '"Hello," said {f}. "You look lost. Where do you live?" {H} told {f.him} everything.',
            '"Can you help me?" asked {h}. "I want to go home."',
            '"Please tell me the way home," said {h}.',
        ),
        (
            '"I know the way," said {f}. "Just follow me."',
            '"Do you see that bright star?" said {f}. "If we follow it, we will find your home."',
            '{F} thought for a moment. "The stream runs down to your home," {f.he} said. "Let us follow it."',
            '"Do not worry," said {f}. "I have walked this way many times."',
        ),
        (
            "They walked side by side and told each other stories, so the way home did not seem long.",
            "They walked past the trees and over the hills until {h} saw a light. It was home!",
            "Soon {h} saw {h.his} home. {H.his} family was waiting at the door.",
            "Step by step they came closer. At last {h} was home again.",
        ),
        (
            "{H} thanked {f} and promised never to go so far alone again.",
            'There was warm soup for everyone. "Thank you, {f.call}," said {h}. "You can visit me every day."',
            "{H} hugged {f}. From that day on, they explored the world together.",
            "{H} was happy to be home, and {h.he} had found a new friend too.",
        ),
    ),
)

GIFT = Plot(
    name="gift",
    lands=_GREEN,
    topics=("a birthday", "a birthday party", "a present", "a present for a friend"),
    direct=(
        "{H.he} was thinking about the birthday of {f.first}. {H.he} did not have a present yet.",
        "The next day was the birthday of {f.first}, but {h} had no present.",
    ),
    extra={
        "gift": (
            "crown of flowers",
            "little wooden boat",
            "necklace of shells",
            "cake with berries",
            "small picture",
            "new song",
            "warm scarf",
            "paper star",
        )
    },
    beats=(
        (
            "{F.first} had a birthday, and there was going to be a party. But {h} had no present.",
            "{lead} {h} heard that it was the birthday of {f.first}. {H.he} did not have a present.",
            "It was the day before the birthday of {f}, {h.his} best friend. {H} wanted to find the perfect present.",
        ),
        (
            "{H.he} had no money, and {h.he} did not know what to do.",
            "{H.he} looked {p.at} and {p2.at}, but nothing was good enough.",
            '"What can I give to {f}?" {h.he} thought.',
            "{H.he} thought and thought, but {h.he} had no idea.",
        ),
        (
            "So {h.he} asked {o} for help.",
            "Then {h.he} met {o.intro} and told the whole story.",
            '{O} saw that {h} was worried. "What is the matter?" asked {o}.',
        ),
        (
            '"The best presents are made with love," said {o}. "Make something yourself."',
            '"You do not need money," said {o}. "You have time and a good heart."',
            '"Why do you not make {a_gift}?" said {o}.',
        ),
        (
            "So {h} worked all day and made {a_gift}.",
            "{H} had a good idea. {H.he} sat down {p3.at} and made {a_gift}.",
            "{H} went to work at once. In the evening, {h.he} had made {a_gift}.",
        ),
        (
            'At the party, {h} was a little shy. "I made this for you," {h.he} said.',
            "The next day, {h} gave the {gift} to {f}.",
            '"Happy birthday, {f.call}!" said {h}. "Here is {a_gift} for you."',
        ),
        (
            '"This is the best present of all!" said {f}, and they danced and laughed until late.',
            "{F} was so happy that {f.he} hugged {h} for a long time.",
            '"You made it yourself?" asked {f}. "I will always keep it in my heart." {H} smiled.',
            "{F} loved it. {H} learned that a present from the heart is worth more than gold.",
        ),
    ),
)

STORM = Plot(
    name="storm",
    lands=_GREEN,
    topics=("a storm", "working together", "a broken bridge"),
    direct=(
        "Suddenly big dark clouds came, and a storm began. When it was over, {ruin} was broken.",
        "Then {h.he} saw that {ruin} was broken. The storm had done it.",
    ),
    extra={
        "ruin": (
            "the old bridge",
            "the little bridge",
            "the roof of the mill",
            "the big fence",
            "the wall of the garden",
        )
    },
    beats=(
        (
            "One night, there was a big storm. In the morning, {h} saw that {ruin} was broken.",
            "{lead} big dark clouds came, and a storm began. When it was over, {ruin} was broken.",
            "One [autumn|spring|summer] night, the wind was so strong that it broke {ruin}.",
        ),
        (
            "{H} and {f.first} did not know what to do.",
            '"What shall we do now?" asked {f.first}.',
            "{F.first} was very sad.",
            '"Oh dear," said {f.first}. "It will take a long time to fix this."',
        ),
        (
            "{H} wanted to fix it alone, but it was too much work for one.",
            "{H} began to work at once, but the [wood was|stones were] too heavy.",
            "{H} carried wood all morning, but soon {h.he} was tired.",
        ),
        (
            'Then {h.he} had an idea. "If everyone helps, we can do it," {h.he} said.',
            'Then {o} came. "Many hands make light work," said {o}. "Let us call the others."',
            "So {h} went from door to door and asked everyone to help.",
        ),
        (
            "Soon everyone came. {F} brought a hammer, and the neighbors brought a long rope.",
            "Some brought wood and some brought tools. {F} brought a big pot of soup.",
            "One after the other, all the neighbors came. Even the smallest ones carried a stone.",
        ),
        (
            "They worked together all day, and nobody was too small to help.",
            "They worked until the evening and sang songs.",
            "They worked for three days. It was hard, but it was fun.",
        ),
        (
            "When they had finished, {ruin} was stronger than before, and everyone cheered.",
            "In the end, {ruin} was as good as new. {H} was tired but very happy.",
            "At last the work was done. They had a big party, and {h} and {f} danced all night.",
            "Then the sun came out. {H} learned that together we can do almost anything.",
        ),
    ),
)

RACE = Plot(
    name="race",
    lands=_ANYWHERE,
    topics=("a race", "being too proud", "winning and losing"),
    direct=(
        '{H.he} was very fast. "Nobody can run faster than me," {h.he} said to {f.first}.',
        "{H.he} wanted to have a race with {f.first}.",
    ),
    beats=(
        (
            "{H} could run very fast, and {h.he} was very proud of it. {lead} {h.he} met {f.intro}.",
            '"I am the fastest of all!" {h} said every day to {f.first}.',
            "{lead} {h} laughed at {f.first} because {f} was so slow.",
        ),
        (
            '"Let us have a race," said {f}. {H} laughed. "That will be easy," {h.he} said.',
            "{F} wanted to have a race {p.to}, and {h} said yes.",
            '"Shall we race {p.to}?" asked {h}. "Yes," said {f}. "I will do my best."',
        ),
        (
            '"One, two, three, go!" {H} ran away like the wind, and {f} was far behind.',
            "The race began. {H} was soon so far ahead that {h.he} could not see {f} anymore.",
            "They started at the same time. {H} ran fast, and {f} went slowly but never stopped.",
        ),
        (
            'On the way, {h} thought, "I have a lot of time." So {h.he} lay down {p2.at} and fell '
            "asleep. Meanwhile, {f} went on and on and did not stop.",
            "{H} stopped {p2.at} to rest and play. {H.he} forgot all about the race. But {f} came "
            "closer, step by step.",
            "But {h} did not look at the path. {H.he} fell over a stone and hurt {h.his} foot. A "
            "little later, {f} came by.",
            "But then {h} wanted to take a shorter way and got lost in the fog. {F} stayed on the path and went on.",
        ),
        (
            "When {h} started to run again, it was too late. {F} had won the race!",
            "{H} ran as fast as {h.he} could, but {f} was already there. {F} had won!",
            "In the end, {f} won the race, and everyone was surprised.",
        ),
        (
            '"You did very well," said {h}. "I will never laugh at you again."',
            "{H} learned that it is not enough to be fast.",
            '{H} was [quiet|ashamed] for a moment. Then {h.he} smiled. "Slow and steady is a good '
            'way too," {h.he} said.',
            "After that day, {h} was not so proud anymore, and the two became good friends.",
        ),
    ),
)

TRUTH = Plot(
    name="truth",
    lands=("town", "castle", "farm", "wild"),
    topics=("telling the truth", "honesty", "a broken {pot}", "saying sorry"),
    direct=(
        "{H.he} jumped and ran, and then there was a loud noise. {H.he} had broken {pot_of}.",
        "{H.he} did not look where {h.he} was going. Crash! {H.he} had broken {pot_of}.",
    ),
    extra={
        "pot": ("jug", "cup", "blue vase", "big bowl", "clay pot", "lamp", "plate"),
        "pot_of": ("{o}'s {pot}",),
    },
    beats=(
        (
            "{lead} {h} was playing inside with a ball. Crash! {Pot_of} fell down and broke.",
            "{lead} {h} ran through the room and did not look. Crash! {H.he} had broken {pot_of}.",
            "{lead} {h} wanted to help in the kitchen. But {h.he} was not careful, and {pot_of} broke.",
        ),
        (
            "{H} was afraid. {H.he} hid the pieces {spot}.",
            '"Nobody has seen me," thought {h}, and {h.he} hid the pieces.',
            "{H} did not know what to do. {H.he} ran away and hid {p.at}.",
        ),
        (
            'In the evening, {o} asked, "Do you know what happened to my {pot}?" "No," said {h} in a small voice.',
            'Soon {o} came home. "Who broke my {pot}?" {o} asked. {H} said, "It was the wind."',
            '{O} looked around. "Where is my {pot}?" asked {o}. {H} said nothing.',
        ),
        (
            "That night {h} could not sleep. {H.his} heart felt heavy.",
            "But after that {h} was not happy. {H.he} could not eat and could not play.",
            'The next day, {h.he} told {f.first} about it. "You should tell the truth," said {f}.',
        ),
        (
            'So {h} went to {o}. "I broke your {pot}," {h.he} said. "I am very sorry."',
            'In the morning, {h} told the truth. "It was me," {h.he} said with tears in {h.his} eyes.',
            'At last {h.he} took a deep breath. "I was the one who broke it," {h.he} said. "I am sorry."',
        ),
        (
            '{O} was not angry. "A {pot} can be fixed," said {o}. "I am glad that you told me."',
            '{O} smiled. "Thank you for telling the truth," said {o}. "That was very brave."',
            '"I knew it already," said {o}, "and I was waiting for you to tell me." Then {o} hugged {h.him}.',
        ),
        (
            "Together they put the pieces back, and {h} felt much better.",
            "{H} felt as light as a bird. From that day on, {h.he} always told the truth.",
            "{H} helped to clean up, and that night {h.he} slept very well.",
            "{H} learned that the truth is always the best way.",
        ),
    ),
)

GARDEN = Plot(
    name="garden",
    lands=_GREEN,
    topics=("a seed", "a garden", "waiting", "a big {plant}"),
    direct=(
        "{H.he} found a tiny seed and put it in {h.his} pocket.",
        "There {h.he} saw a small seed on the ground and took it home.",
    ),
    extra={"plant": ("pumpkin", "sunflower", "apple tree", "rose", "carrot", "strawberry plant")},
    beats=(
        (
            "{lead} {h} found a small seed {p.at}.",
            "{lead} {o} gave {h.him} a tiny seed.",
            "{H} wanted to have a garden. {lead} {h.he} got a seed from {f.first}.",
        ),
        (
            "{H.he} dug a little hole, put the seed into the earth and gave it some water.",
            "{H.he} planted it in the warm earth and watered it.",
            '"I will take good care of you," {h.he} said, and {h.he} planted the seed.',
        ),
        (
            "The next morning {h.he} went to look, but there was nothing. There was nothing the day after, either.",
            "{H} waited one day. {H.he} waited two days. Nothing happened.",
            "Every morning {h} looked at the earth, but {h.he} saw nothing at all.",
        ),
        (
            '"It does not work!" said {h}, and {h.he} wanted to dig it up again.',
            '"Why does it not grow?" {h} asked {o}.',
            "{H} became sad. Maybe the seed did not like the place.",
        ),
        (
            '"Be patient," said {o}. "A seed needs sun, water and time."',
            '"Good things need time," said {o}. "Wait a little longer."',
            '{O} smiled and said, "It is growing under the earth, where you can\'t see it."',
        ),
        (
            "So {h} watered it every day and sang to it. And one morning there was a small green leaf!",
            "{H} waited and watered. Then it rained, and after the rain there were two green leaves.",
            "{H} did what {o} said. One morning, a tiny green plant looked out of the earth.",
        ),
        (
            "It grew and grew, until it was a big {plant}. {H} was very proud.",
            "By the end of the summer, it was {a_plant}, the most beautiful one of all. {H} showed it to everyone.",
            "In the end, {h} had a wonderful {plant}. {H.he} showed it to all {h.his} friends, and they had a party.",
            "When it was big, everyone came to see the {plant}. {H} learned to be patient.",
        ),
    ),
)

MAGIC = Plot(
    name="magic",
    lands=("town", "castle", "wild", "farm"),
    topics=("a magic {charm}", "magic", "a wish"),
    direct=(
        "There {h.he} met an old man who was tired and could not go on.",
        "{H.he} saw an old woman who was carrying a heavy bag.",
    ),
    extra={
        "charm": ("bell", "feather", "stone", "seed", "lamp", "ring", "flute", "key"),
        "wish": (
            "that the dry river would run again",
            "that the long winter would end",
            "that everyone in the village would have enough to eat",
            "that every sick child would be well again",
            "that the sad king would laugh again",
        ),
    },
    beats=(
        (
            "{lead} {h} went {p.to}. There {h.he} met a tiny old man with a long white beard. He "
            "was carrying a heavy bag.",
            "{lead} {h} met an old woman in a gray coat. She was tired and could not go on.",
            "{lead} a stranger knocked at the door. It was an old woman who was cold and hungry.",
        ),
        (
            '"Let me help you," said {h}.',
            "{H} helped right away and asked for nothing.",
            '"Come and rest a little," said {h}. "I will help you."',
        ),
        (
            '"You have a good heart," said the stranger. "Take this {charm}. It is magic, and it '
            'will give you one wish."',
            'The stranger smiled and took out a small {charm}. "This is a magic {charm}," said the '
            'stranger. "Use it well."',
            "The stranger gave {h.him} a little {charm}. It was shining like a star. "
            '"It has one wish in it," said the stranger.',
        ),
        (
            "{H} thought about it for a long time. {H.he} could wish for gold or for a big house.",
            '"What shall I wish for?" {h} asked {f.first}. "You will know it when the time comes," said {f}.',
            "At first {h.he} wanted to wish for a hundred cakes. But then {h.he} thought of the others.",
        ),
        (
            "In the end, {h} held the {charm} tightly and wished {wish}.",
            '{H} closed {h.his} eyes. "I wish {wish}," {h.he} whispered.',
        ),
        (
            "The {charm} began to shine, and the wish came true!",
            "There was a bright light, and then everything was quiet. The wish had come true.",
            "For a moment nothing happened. Then there was soft music in the air, and the wish came true.",
        ),
        (
            "Everyone was happy, and nobody was happier than {h}.",
            "There was a big party. {H} kept the {charm}, although it was not magic anymore.",
            "{H} had used the wish for others, and that made {h.him} the happiest of all.",
            "And if you listen carefully at night, you can still hear {h} telling the story to {h.his} friends.",
        ),
    ),
)

TREASURE = Plot(
    name="treasure",
    lands=("town", "castle", "wild", "farm", "plain", "snow"),
    topics=("a treasure", "an old map", "an adventure", "two friends"),
    direct=(
        "There {h.he} found an old map. On the map there was a red cross.",
        "{H.he} found an old bottle with a map in it.",
    ),
    extra={
        "treasure": (
            "old books full of pictures",
            "shiny stones in all colors",
            "old toys",
            "a flute and a drum",
            "golden coins",
            "letters from long ago",
        )
    },
    beats=(
        (
            "{lead} {h} found an old map {p.at}. On the map there was a red cross.",
            "{lead} {h} found an old map in a bottle.",
            "{lead} the wind blew a piece of paper to {h}. It was a map!",
        ),
        (
            '{H.he} showed it to {f.first}. "It is a treasure map!" said {f}.',
            '"Look what I found," {h} said to {f.first}. "Let us go and find the treasure."',
            "{H} did not want to go alone, so {h.he} asked {f.first} to come along.",
        ),
        (
            "They took some bread and water and followed the path {p2.to}.",
            "They walked the whole morning and came {p2.to}.",
            "The map showed the way {p2.to}. From there they had to take fifty steps.",
        ),
        (
            'It was a long way, and {f} was tired. "Let us rest a little," said {h}.',
            "Then they came to a deep hole. {H} was afraid, but {f} stayed close.",
            "Once they took the wrong way, and once it began to rain. But they did not stop.",
        ),
        (
            "At last they saw the red cross. It was a mark on a stone {p3.at}.",
            "In the afternoon they reached the place. They began to dig.",
            '"Here it is!" called {f}. There was a cross on the ground.',
        ),
        (
            "Under the stone there was an old box. In the box they found {treasure}.",
            "They found a box and opened it carefully. It was full of {treasure}.",
            "There was a big box with a lock. {H} pulled hard, and it opened. They saw {treasure}.",
        ),
        (
            "They shared everything with their friends at home.",
            '"The best treasure is to have a friend like you," said {h}, and {f} smiled.',
            "They laughed and carried it home. It was the best day of the whole year.",
            "In the evening they told everyone about their adventure.",
        ),
    ),
)

NEW_FRIEND = Plot(
    name="new friend",
    lands=_ANYWHERE,
    topics=("a new friend", "making friends", "friendship", "playing together"),
    direct=(
        "There {h.he} saw {f.intro} who was sitting alone and looked sad.",
        "Then {h.he} saw someone new. It was {f.intro}.",
    ),
    extra={
        "game": (
            "played hide and seek",
            "played with a ball",
            "told each other jokes",
            "ran around and laughed",
            "built a little house of sticks and stones",
            "made up a new song",
        )
    },
    beats=(
        (
            "{H} was often alone and wished for a friend. {lead} {h.he} saw {f.intro} {p.at}.",
            "{lead} {f.intro} came to live near {h}.",
            "{lead} {h} went {p.to}. There {h.he} saw {f.intro} who was sitting all alone.",
        ),
        (
            "{F} was new and did not know anyone.",
            "Nobody played with {f}, because {f.he} was different from the others.",
            "{F} was very shy and did not say a word.",
        ),
        (
            "{H} was shy too. What should {h.he} say?",
            '"Maybe {f.he} does not like me," thought {h}.',
            "{H} waited a moment. Then {h.he} took a deep breath.",
        ),
        (
            '"Hello, I am {h}," said {h}. "Do you want to play with me?"',
            '{H} went over and smiled. "Would you like to play?" {h.he} asked.',
            '"You can sit with me," said {h}.',
        ),
        (
            '{F} looked up and smiled. "Yes, please!" said {f}.',
            'At first {f} was quiet, but then {f.he} smiled. "I would like that very much," {f.he} said.',
            "{F} was surprised and very happy.",
        ),
        (
            "They {game} all afternoon.",
            "They went {p2.to} and {game}.",
            "First they {game}. Then they had a picnic {p2.at}.",
        ),
        (
            "From that day on, {h} and {f} were never alone again.",
            "When the sun went down, {h} and {f} were best friends.",
            '"Will you come again tomorrow?" asked {f}. "Tomorrow and every day," said {h}.',
            "{H} learned that a kind word can be the beginning of a friendship.",
        ),
    ),
)

PLOTS: tuple[Plot, ...] = (
    LOST_THING,
    LEARNING,
    RESCUE,
    SHARING,
    AFRAID,
    LOST_WAY,
    GIFT,
    STORM,
    RACE,
    TRUTH,
    GARDEN,
    MAGIC,
    TREASURE,
    NEW_FRIEND,
)
