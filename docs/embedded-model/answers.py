"""What the embedded model knows about the server: its flags, its routes and a few basic ideas.

Every entry is a fact written down once, with wordings for the question and the answer around it.
The questions that the model cannot answer are here too, so that it learns to say so politely.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

SELF = (
    "I am the small demo model that comes with Lockstep. I can tell short stories and answer "
    "questions about the flags of the server."
)
SELF_SHORT = "I am the small demo model that comes with Lockstep."


@dataclass(frozen=True)
class Flag:
    """One command line flag: what it does, its default and how people ask for its effect."""

    name: str
    does: str
    default: str
    example: str
    wishes: tuple[str, ...]


@dataclass(frozen=True)
class Exchange:
    """One question and its answer."""

    question: str
    answer: str


def _flag(name: str, does: str, default: str, example: str, *wishes: str) -> Flag:
    return Flag(name, does, default, example, wishes)


FLAGS: tuple[Flag, ...] = (
    _flag(
        "--model-id",
        "names the model to serve. It can be a model on the hub or a local folder.",
        "The default is the embedded demo model.",
        "--model-id /models/bloom",
        "choose the model",
        "serve my own model",
        "load a model from a local folder",
    ),
    _flag(
        "--revision",
        "chooses the version of the model on the hub. It can be a branch, a tag or a commit.",
        "",
        "--revision main",
        "choose the revision of a model",
        "use another branch of the model",
    ),
    _flag(
        "--num-shard",
        "sets the number of shards. The model is split over this many GPUs with tensor "
        "parallelism. It can be 1, 2, 4 or 8.",
        "",
        "--num-shard 4",
        "set the number of shards",
        "split the model over several GPUs",
        "use two GPUs",
        "use four GPUs",
    ),
    _flag(
        "--sharded",
        "turns sharding on. With true, the model is split over every visible GPU.",
        "",
        "--sharded true",
        "use all GPUs",
        "use every visible GPU",
    ),
    _flag(
        "--quantize",
        "sets the format of the weights. With int8, the weights need less GPU memory.",
        "By default the weights are not quantized.",
        "--quantize int8",
        "load the weights in int8",
        "make the weights smaller",
        "quantize the model",
    ),
    _flag(
        "--dtype",
        "sets the number type of the weights. It can be float32, float16 or bfloat16.",
        "The default is the type of the checkpoint.",
        "--dtype bfloat16",
        "set the data type",
        "run the model in bfloat16",
        "run the model in float16",
    ),
    _flag(
        "--trust-remote-code",
        "is accepted but not needed. Lockstep never executes code from a model repository.",
        "",
        "--trust-remote-code",
    ),
    _flag(
        "--max-concurrent-requests",
        "limits how many requests the server takes at the same time. More requests get the "
        "error 429, which means that the server is overloaded.",
        "The default is 128.",
        "--max-concurrent-requests 256",
        "limit the number of requests at the same time",
        "allow more requests at the same time",
    ),
    _flag(
        "--max-best-of",
        "is the largest value of best_of that a client may ask for.",
        "The default is 2.",
        "--max-best-of 4",
        "allow a larger best_of",
    ),
    _flag(
        "--max-stop-sequences",
        "is the largest number of stop sequences in one request.",
        "The default is 4.",
        "--max-stop-sequences 8",
        "allow more stop sequences",
    ),
    _flag(
        "--max-top-n-tokens",
        "is the largest number of top tokens that a client may ask for at each step.",
        "The default is 5.",
        "--max-top-n-tokens 10",
        "allow more top tokens",
    ),
    _flag(
        "--max-input-length",
        "sets the longest prompt, counted in tokens. Longer prompts are rejected.",
        "The default is 1024.",
        "--max-input-length 2000",
        "allow longer prompts",
        "limit the length of the prompt",
    ),
    _flag(
        "--max-total-tokens",
        "limits the tokens of one request. The prompt and the generated tokens count together.",
        "The default is 2048.",
        "--max-total-tokens 4096",
        "limit the tokens of one request",
        "generate longer texts",
    ),
    _flag(
        "--waiting-served-ratio",
        "decides when waiting requests are let in. They are let in when there are this many "
        "waiting requests for each running request.",
        "The default is 0.3.",
        "--waiting-served-ratio 1.2",
        "let waiting requests in earlier",
    ),
    _flag(
        "--max-batch-prefill-tokens",
        "limits how many prompt tokens are computed in one step.",
        "The default is 4096.",
        "--max-batch-prefill-tokens 8192",
        "limit the prompt tokens in one step",
        "use less memory for the prefill",
    ),
    _flag(
        "--max-batch-total-tokens",
        "sets how many tokens the KV cache holds for all running requests together.",
        "By default it is inferred from the free memory.",
        "--max-batch-total-tokens 32000",
        "set the size of the KV cache",
    ),
    _flag(
        "--max-waiting-tokens",
        "sets how long requests wait. After this many decode steps, waiting requests are let in.",
        "The default is 20.",
        "--max-waiting-tokens 10",
        "make requests wait less",
    ),
    _flag(
        "--max-batch-size",
        "sets the largest number of requests that run together.",
        "There is no limit by default.",
        "--max-batch-size 32",
        "limit the batch size",
        "limit how many requests run together",
    ),
    _flag(
        "--hostname",
        "sets the address that the server listens on.",
        "The default is 0.0.0.0.",
        "--hostname 127.0.0.1",
        "change the address",
        "listen on another address",
    ),
    _flag(
        "--port",
        "sets the port that the server listens on.",
        "The default is 3000.",
        "--port 8080",
        "change the port",
        "listen on another port",
    ),
    _flag(
        "--shard-uds-path",
        "sets the prefix of the unix sockets of the shards.",
        "By default they are in a private folder.",
        "--shard-uds-path /tmp/shard",
        "move the sockets of the shards",
    ),
    _flag(
        "--master-addr",
        "sets the address where the shards meet when they start.",
        "The default is localhost.",
        "--master-addr localhost",
        "change the address where the shards meet",
    ),
    _flag(
        "--master-port",
        "sets the port where the shards meet when they start.",
        "The default is 29500.",
        "--master-port 29501",
        "change the port where the shards meet",
    ),
    _flag(
        "--huggingface-hub-cache",
        "sets the folder for downloads from the hub.",
        "",
        "--huggingface-hub-cache /data",
        "change the folder for downloads",
        "choose where models are downloaded",
    ),
    _flag(
        "--weights-cache-override",
        "names a folder that already holds the weights. They are read from there.",
        "",
        "--weights-cache-override /data/weights",
        "read the weights from another folder",
    ),
    _flag(
        "--disable-custom-kernels",
        "turns the custom kernels off. The plain reference kernels are used.",
        "",
        "--disable-custom-kernels",
        "turn off the custom kernels",
        "use the plain reference kernels",
    ),
    _flag(
        "--cuda-memory-fraction",
        "sets the share of the GPU memory that Lockstep may use.",
        "The default is 1.0.",
        "--cuda-memory-fraction 0.8",
        "use less GPU memory",
        "limit the GPU memory",
    ),
    _flag(
        "--json-output",
        "writes the logs as JSON lines.",
        "By default the logs are plain text.",
        "--json-output",
        "get the logs as JSON",
        "write logs in JSON",
    ),
    _flag(
        "--otlp-endpoint",
        "sets the address where traces are sent.",
        "",
        "--otlp-endpoint http://localhost:4317",
        "send traces",
        "turn on tracing",
    ),
    _flag(
        "--cors-allow-origin",
        "sets the origins that may call the server from a browser.",
        "",
        "--cors-allow-origin https://example.com",
        "call the server from a browser",
        "allow an origin",
    ),
    _flag(
        "--watermark-gamma",
        "sets the gamma value of the watermark.",
        "The default is 0.5.",
        "--watermark-gamma 0.25",
        "set the gamma of the watermark",
    ),
    _flag(
        "--watermark-delta",
        "sets the delta value of the watermark.",
        "The default is 2.0.",
        "--watermark-delta 1.5",
        "set the delta of the watermark",
    ),
    _flag(
        "--tokenizer-config-path",
        "names the tokenizer config file to use.",
        "",
        "--tokenizer-config-path /data/tokenizer_config.json",
        "use another tokenizer config",
    ),
    _flag(
        "--device",
        "chooses where the model runs. It can be auto, cuda or cpu.",
        "",
        "--device cpu",
        "run on the CPU",
        "choose the device",
    ),
    _flag(
        "--validation-workers",
        "sets the number of tokenizer threads that check the requests.",
        "The default is 2.",
        "--validation-workers 4",
        "use more tokenizer threads",
    ),
    _flag(
        "--max-client-batch-size",
        "is the largest number of inputs that a client may send in one request.",
        "The default is 4.",
        "--max-client-batch-size 8",
        "allow more inputs in one request",
    ),
    _flag(
        "--payload-limit",
        "sets the largest size of a request in bytes.",
        "The default is 2000000 bytes.",
        "--payload-limit 4000000",
        "allow larger requests",
        "limit the size of a request",
    ),
    _flag(
        "--api-key",
        "sets a key for the server. Clients must send it as a bearer token.",
        "",
        "--api-key secret",
        "protect the server with a key",
        "set an API key",
    ),
    _flag(
        "--env",
        "prints the environment.",
        "",
        "--env",
        "print the environment",
    ),
)

_IDEAS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        (
            "What is Lockstep?",
            "Tell me about Lockstep.",
            "What does Lockstep do?",
            "What is this server?",
            "Explain Lockstep.",
        ),
        (
            "Lockstep is a text generation server. It splits a model over several GPUs, and all "
            "shards run in lockstep on one ordered stream of commands.",
            "Lockstep is a server for text generation. A router batches the requests, and the "
            "shards run the model together.",
        ),
    ),
    (
        (
            "What is deep learning?",
            "What is Deep Learning?",
            "Explain deep learning.",
            "What does deep learning mean?",
        ),
        (
            "Deep learning is a kind of machine learning. It uses neural networks with many "
            "layers that learn from examples.",
            "Deep learning is a way to teach computers with examples. It uses neural networks with many layers.",
        ),
    ),
    (
        ("What is machine learning?", "What is Machine Learning?", "Explain machine learning."),
        ("Machine learning is a way to make computers learn from examples. Nobody has to write down every rule.",),
    ),
    (
        ("What is a neural network?", "What are neural networks?", "Explain neural networks."),
        (
            "A neural network is a program made of many simple parts in layers. It learns from "
            "examples by changing its weights.",
        ),
    ),
    (
        ("What is a language model?", "What is a large language model?", "What is an LLM?"),
        (
            "A language model is a neural network that has learned to continue a text. It "
            "predicts one token after the other.",
        ),
    ),
    (
        ("What is a token?", "What are tokens?", "What does token mean?"),
        ("A token is a small piece of text, such as a word or a part of a word. The model reads and writes tokens.",),
    ),
    (
        ("What is a tokenizer?", "What does a tokenizer do?"),
        ("A tokenizer cuts a text into tokens and puts tokens together into text again.",),
    ),
    (
        ("What is tensor parallelism?", "What is tensor parallel?", "Explain tensor parallelism."),
        (
            "Tensor parallelism splits every layer of a model over several GPUs. Each shard "
            "computes a part of the layer, and the parts are added together.",
        ),
    ),
    (
        ("What is a shard?", "What are shards?", "What does a shard do?"),
        (
            "A shard is one process that holds a part of the model. All shards run in lockstep "
            "on one ordered stream of commands.",
        ),
    ),
    (
        ("What is a GPU?", "What does a GPU do?", "Why do I need a GPU?"),
        ("A GPU is a chip that does many calculations at the same time. It makes large models fast.",),
    ),
    (
        (
            "What is the KV cache?",
            "What is a KV cache?",
            "How does the KV cache work?",
            "What is paged attention?",
        ),
        (
            "The KV cache keeps the keys and values of earlier tokens, so they are computed only "
            "once. In Lockstep it is paged in blocks of 16 tokens.",
        ),
    ),
    (
        ("What is continuous batching?", "How are requests batched?", "Explain batching."),
        (
            "The router batches requests continuously. New requests can join the running batch, "
            "and finished requests leave it at once.",
        ),
    ),
    (
        ("What is the router?", "What does the router do?"),
        ("The router takes the requests, batches them continuously and sends them to the shards.",),
    ),
    (
        ("What is prefill?", "What does prefill mean?"),
        ("Prefill is the first step of a request. All tokens of the prompt are computed there.",),
    ),
    (
        ("What is quantization?", "What does int8 mean?", "Explain quantization."),
        ("Quantization stores the weights with fewer bits. With int8, a weight needs one byte.",),
    ),
    (
        ("What is streaming?", "How can I stream tokens?", "How do I get tokens one by one?"),
        ("Send the prompt to /generate_stream. The server sends every token as soon as it is ready.",),
    ),
    (
        ("What is temperature?", "What does the temperature do?"),
        (
            "The temperature says how freely the next token is chosen. A low value is careful, "
            "and a high value gives more variety.",
        ),
    ),
    (
        ("What is greedy decoding?", "What is greedy search?"),
        ("With greedy decoding, the model always takes the most likely token.",),
    ),
    (
        (
            "Which routes does the server have?",
            "What routes are there?",
            "What are the endpoints?",
            "Which endpoints does Lockstep have?",
        ),
        ("The routes are /generate, /generate_stream, /, /info, /health, /metrics, /tokenize and /docs.",),
    ),
    (
        ("How do I generate text?", "How do I send a prompt?", "How can I use this server?"),
        ("Send the prompt to /generate. Use /generate_stream to get the tokens one by one.",),
    ),
    (
        (
            "Is the server healthy?",
            "What is /health for?",
            "How do I check the health of the server?",
        ),
        ("Ask the /health route. It tells you whether the server is healthy.",),
    ),
    (
        ("What is /metrics for?", "Where are the metrics?", "How do I watch the server?"),
        ("The /metrics route shows the numbers that you need to watch the server.",),
    ),
    (
        ("What is /info for?", "How do I see which model is running?"),
        ("The /info route tells you which model is running and how the server is set up.",),
    ),
    (
        ("What is /tokenize for?", "How do I count tokens?"),
        ("The /tokenize route shows the tokens of a text.",),
    ),
    (
        ("Where is the documentation?", "What is /docs for?", "Where can I read about the API?"),
        ("The /docs route describes the API of the server.",),
    ),
    (
        (
            "How do I stop the server?",
            "What happens on SIGTERM?",
            "What does SIGTERM do?",
            "How do I shut down the server?",
        ),
        ("Send SIGTERM. The server drains: running requests finish, and new requests get the error 503.",),
    ),
    (
        ("What does the error 429 mean?", "Why do I get 429?", "What is error 429?"),
        (
            "The error 429 means that the server is overloaded. You can wait, or you can set "
            "--max-concurrent-requests to a larger number.",
        ),
    ),
    (
        ("What does the error 503 mean?", "Why do I get 503?"),
        ("The error 503 means that the server is shutting down and takes no new requests.",),
    ),
    (
        ("How do I measure the speed?", "How do I run a benchmark?", "What is lockstep-bench?"),
        ("Use the benchmark command lockstep-bench. It measures how fast the server is.",),
    ),
    (
        ("Is it safe to load a model?", "Does Lockstep run code from the model repository?"),
        ("No code from a model repository is ever executed.",),
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Tell me about yourself.",
            "who are you?",
            "Are you a person?",
            "Which model is this?",
        ),
        (SELF,),
    ),
    (
        (
            "What can you do?",
            "Can you help me?",
            "How can you help me?",
            "Help",
            "I need help.",
            "What do you know?",
        ),
        (
            "I can tell short stories and answer questions about the flags of the server. Try: "
            "Tell me a story about a fox.",
        ),
    ),
    (
        ("Hello", "Hello!", "Hi", "Hi!", "hello", "hi", "Hey", "Hello there!", "Good morning"),
        (f"Hello! {SELF_SHORT} Ask me about a flag, or ask me for a story.",),
    ),
    (
        ("How are you?", "How are you today?", "how are you?"),
        ("I am fine, thank you. Ask me about a flag of the server, or ask me for a story.",),
    ),
    (
        ("Thank you", "Thank you!", "Thanks", "Thanks!", "Great, thank you."),
        ("You are welcome! Do you want to hear another story?",),
    ),
    (
        ("Goodbye", "Bye", "Bye!", "Good night"),
        ("Goodbye! Come back when you want to hear a story.",),
    ),
    (
        ("Test", "test", "This is a test.", "Testing", "Test request", "ping"),
        (f"The test works. {SELF_SHORT}",),
    ),
)

_UNKNOWN_SUBJECTS: tuple[str, ...] = (
    "the weather",
    "the news",
    "football",
    "physics",
    "the moon",
    "cooking",
    "music",
    "history",
    "the stock market",
    "quantum computers",
    "black holes",
    "politics",
    "chess",
    "law",
    "medicine",
    "art",
    "movies",
    "computers",
    "Linux",
    "Python",
    "France",
    "Japan",
    "mathematics",
    "the human brain",
    "climate change",
    "space",
    "the ocean",
)
_UNKNOWN_FORMS: tuple[str, ...] = (
    "Tell me about {subject}.",
    "What do you think about {subject}?",
    "Explain {subject}.",
    "Explain {subject} to me.",
    "What do you know about {subject}?",
    "Write a poem about {subject}.",
    "Write an email about {subject}.",
    "Write an essay about {subject}.",
    "Write a program about {subject}.",
    "Can you teach me {subject}?",
    "What is new in {subject}?",
    "Give me a summary of {subject}.",
)
_UNKNOWN_QUESTIONS: tuple[str, ...] = (
    "What is the capital of {place}?",
    "How many people live in {place}?",
    "Who is the president of {place}?",
    "What time is it?",
    "What is {left} + {right}?",
    "What is {left} times {right}?",
    "Write a Python function that adds two numbers.",
    "Translate this into {language}.",
    "How old are you?",
    "What is the meaning of life?",
    "What should I eat today?",
    "Can you write code?",
    "Do you speak {language}?",
    "Who won the game?",
    "What is the best phone?",
    "How do I cook rice?",
    "Why is the sky blue?",
    "What is love?",
    "Write a haiku.",
    "Solve this problem.",
)
_COUNTRIES = ("France", "Spain", "Japan", "Italy", "Brazil", "Canada", "India", "Kenya", "Peru")
_LANGUAGES = ("French", "German", "Spanish", "Chinese", "Italian", "English")
_UNKNOWN_ANSWERS: tuple[str, ...] = (
    f"I do not know that. {SELF}",
    f"I cannot answer that. {SELF}",
)


def _flag_question(rng: random.Random, flag: Flag) -> str:
    return rng.choice(
        (
            f"What does {flag.name} do?",
            f"What does {flag.name} do?",
            f"What does {flag.name} mean?",
            f"What is {flag.name}?",
            f"What is {flag.name} for?",
            f"Explain {flag.name}.",
            f"Explain {flag.name}",
            f"Tell me about {flag.name}.",
            f"How do I use {flag.name}?",
            f"When do I need {flag.name}?",
            f"Can you explain {flag.name}?",
            f"What does the flag {flag.name} do?",
            f"What does {flag.name.removeprefix('--')} do?",
            f"what does {flag.name} do",
            f"what is {flag.name}",
            flag.name,
        )
    )


def _describe(rng: random.Random, flag: Flag) -> str:
    subject = rng.choice((flag.name, flag.name, f"The flag {flag.name}"))
    parts = [f"{subject} {flag.does}"]
    if flag.default:
        parts.append(flag.default)
    if rng.random() < 0.35 and flag.example != flag.name:
        parts.append(f"For example: {flag.example}")
    return " ".join(parts)


def _about_flag(rng: random.Random, flag: Flag) -> Exchange:
    roll = rng.random()
    if flag.default and roll < 0.25:
        question = rng.choice(
            (
                f"What is the default of {flag.name}?",
                f"What is the default value of {flag.name}?",
                f"What is the default for {flag.name}?",
            )
        )
        return Exchange(question, flag.default)
    if flag.wishes and roll < 0.55:
        wish = rng.choice(flag.wishes)
        question = rng.choice((f"How do I {wish}?", f"How can I {wish}?", f"I want to {wish}."))
        return Exchange(question, f"Use {flag.name}. It {flag.does}")
    return Exchange(_flag_question(rng, flag), _describe(rng, flag))


def _unknown(rng: random.Random) -> Exchange:
    if rng.random() < 0.6:
        form = rng.choice(_UNKNOWN_FORMS)
        question = form.format(subject=rng.choice(_UNKNOWN_SUBJECTS))
    else:
        question = rng.choice(_UNKNOWN_QUESTIONS).format(
            place=rng.choice(_COUNTRIES),
            language=rng.choice(_LANGUAGES),
            left=rng.randint(1, 99),
            right=rng.randint(1, 99),
        )
    return Exchange(question, rng.choice(_UNKNOWN_ANSWERS))


def make_exchange(rng: random.Random) -> Exchange:
    """One question about the server, about the model itself or about something unknown to it."""
    roll = rng.random()
    if roll < 0.58:
        return _about_flag(rng, rng.choice(FLAGS))
    if roll < 0.9:
        questions, answers = rng.choice(_IDEAS)
        return Exchange(rng.choice(questions), rng.choice(answers))
    return _unknown(rng)
