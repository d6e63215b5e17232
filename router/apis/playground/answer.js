// Shows generated text token by token, and for the token under the pointer or the arrow keys its probability.
//
// What a model writes is hostile until proved otherwise: it reaches the page as the text of nodes, and in no other way.

/**
 * One piece of text as it arrives: { text, tokens }. A token is { text, logprob, id, special, guessed, alternatives }; there are
 * several where only together they are characters, and none where the server gives no probabilities.
 */
export class TokenView {
  #pieces = [];
  #frame = 0;
  #before = []; // tokens without text of their own yet
  #card;

  constructor(element, card) {
    this.element = element;
    this.spans = [];
    this.#card = card;
    element.tokenView = this;
  }

  clear() {
    this.#card.hide();
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.#pieces = [];
    this.#before = [];
    this.spans = [];
    this.element.replaceChildren();
  }

  /** Append a piece; many that come at once are drawn at once. */
  add(piece) {
    this.#pieces.push(piece);
    this.#frame ||= requestAnimationFrame(() => this.flush());
  }

  /** Draw what has come. */
  flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    if (!this.#pieces.length) return;
    const box = scrolling(this.element);
    const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    const drawn = document.createDocumentFragment();
    for (const piece of this.#pieces) this.#draw(piece, drawn);
    this.#pieces = [];
    this.element.append(drawn);
    if (isAtEnd) box.scrollTop = box.scrollHeight;
  }

  #draw({ text, tokens = [], isPrompt = false }, into) {
    this.#before.push(...tokens);
    if (!text) return;
    const span = document.createElement("span");
    span.textContent = text;
    if (isPrompt) span.classList.add("prompt");
    if (this.#before.length) {
      span.tokens = this.#before;
      this.#before = [];
      span.classList.add("token");
      const known = span.tokens.filter(({ logprob }) => typeof logprob === "number");
      if (known.length) span.style.setProperty("--p", Math.exp(Math.min(0, ...known.map(({ logprob }) => logprob))).toFixed(4));
      if (span.tokens.every(({ special }) => special)) span.classList.add("special");
      if (span.tokens.every(({ guessed }) => guessed)) span.classList.add("guessed");
      if (/^\s*\n\s*$/.test(text)) span.classList.add("newline");
      this.spans.push(span);
    }
    into.append(span);
  }
}

/** The card that says what is known of a token. One for the page; it follows the pointer, the arrow keys and taps. */
export class TokenCard {
  #shown = null;
  #at = null; // where its token stood when it was shown

  constructor(element) {
    this.element = element;
    this.span = null;
    document.addEventListener("pointerdown", (event) => {
      if (!event.target.closest?.(".token, .card")) this.hide();
    });
    addEventListener("scroll", () => this.#hideIfMoved(), { capture: true, passive: true });
    addEventListener("resize", () => this.hide());
  }

  /** Have it show the tokens of all views inside `container`. */
  serve(container) {
    const over = (event) => {
      const span = event.target.closest(".token");
      if (span) this.show(span);
    };
    container.addEventListener("pointerover", over);
    container.addEventListener("click", over);
    container.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") this.hide();
    });
    container.addEventListener("keydown", (event) => this.#onKey(event));
    container.addEventListener("focusout", () => this.hide());
  }

  #onKey(event) {
    const view = event.target.tokenView;
    if (!view?.spans.length) return;
    const at = view.spans.indexOf(this.span);
    const last = view.spans.length - 1;
    const to = {
      ArrowRight: at < 0 ? 0 : Math.min(last, at + 1),
      ArrowLeft: at < 0 ? last : Math.max(0, at - 1),
      Home: 0,
      End: last,
    }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      view.spans[to].scrollIntoView({ block: "nearest", behavior: "instant" });
      this.show(view.spans[to]);
    } else if (event.key === "Escape" && !this.element.hidden) {
      event.stopPropagation();
      this.hide();
    }
  }

  #mark(span) {
    this.span?.classList.remove("active");
    this.span = span;
    span?.classList.add("active");
  }

  /** The event of a scroll comes after it, and may come after the card was shown beside what was scrolled to. */
  #hideIfMoved() {
    if (this.element.hidden) return;
    const { left, top } = placeOf(this.span);
    if (Math.abs(left - this.#at.left) + Math.abs(top - this.#at.top) > 1) this.hide();
  }

  hide() {
    if (this.element.hidden) return;
    this.element.hidden = true;
    this.#mark(null);
  }

  show(span) {
    if (this.#shown === span && !this.element.hidden) return;
    this.#shown = span;
    this.#mark(span);
    this.element.replaceChildren(...span.tokens.slice(0, 8).map(described));
    this.element.hidden = false;
    this.#at = placeOf(span);
    this.#place(this.#at);
  }

  #place(token) {
    const { width, height } = this.element.getBoundingClientRect();
    const room = 8;
    const left = Math.max(room, Math.min(token.left, document.documentElement.clientWidth - width - room));
    const below = token.bottom + 4;
    const fits = below + height + room <= innerHeight || token.top < height + room;
    this.element.style.left = `${left}px`;
    this.element.style.top = `${fits ? below : token.top - height - 4}px`;
  }
}

/** Of a token of several lines, its first. */
function placeOf(span) {
  return span.getClientRects()[0] ?? span.getBoundingClientRect();
}

function described(token) {
  const box = document.createElement("div");
  const head = document.createElement("p");
  const known = typeof token.logprob === "number";
  head.append(node("strong", visible(token.text)), node("span", known ? percent(token.logprob) : "no probability"));
  const facts = [...(token.id === undefined ? [] : [`token ${token.id}`]), ...(known ? [`log ${token.logprob.toFixed(3)}`] : [])];
  if (token.special) facts.push("special");
  if (token.guessed) facts.push("guessed ahead");
  box.append(head, node("p", facts.join(" · "), "facts"));
  if (token.alternatives?.length) {
    const list = document.createElement("ol");
    list.setAttribute("aria-label", "Likeliest tokens");
    list.append(...token.alternatives.slice(0, 20).map((one) => alternative(one, token)));
    box.append(list);
  }
  return box;
}

function alternative(one, chosen) {
  const isChosen = one.id === undefined ? one.text === chosen.text : one.id === chosen.id;
  const row = node("li", "", isChosen ? "chosen" : "");
  const bar = node("i", "");
  bar.style.setProperty("--p", Math.exp(Math.min(0, one.logprob)).toFixed(4));
  row.append(bar, node("span", visible(one.text)), node("span", percent(one.logprob)));
  if (isChosen) row.append(node("span", "chosen", "sr"));
  return row;
}

function node(name, text, className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

/** A token so that blanks, line ends and what cannot be seen are seen. */
export function visible(text) {
  if (!text) return "(part of a character)";
  const cut = text.length > 60 ? `${text.slice(0, 60)}…` : text;
  return cut.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/[\p{Cc}\p{Cf}]/gu, "�");
}

function percent(logprob) {
  const share = 100 * Math.exp(Math.min(0, logprob));
  if (share === 0) return "0 %";
  return share >= 99.95 ? "100 %" : share < 0.01 ? "< 0.01 %" : `${share < 1 ? share.toFixed(2) : share.toFixed(1)} %`;
}

function scrolling(element) {
  return element.closest(".scrolls") ?? element;
}
