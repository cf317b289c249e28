"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("scripted");
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);

  const themes = ["", "light", "dark"];
  byId("theme").addEventListener("click", (event) => {
    const next = themes[(themes.indexOf(root.dataset.theme || "") + 1) % themes.length];
    if (next) root.dataset.theme = next; else delete root.dataset.theme;
    event.currentTarget.textContent = next ? `Theme: ${next}` : "Theme";
  });

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button.copy");
    if (!button) return;
    const code = button.parentElement.querySelector("code");
    const said = () => { button.textContent = "Copied"; setTimeout(() => { button.textContent = "Copy"; }, 1500); };
    const byHand = () => {
      const range = document.createRange();
      range.selectNodeContents(code);
      const chosen = getSelection();
      chosen.removeAllRanges();
      chosen.addRange(range);
      if (document.execCommand("copy")) said();
    };
    if (navigator.clipboard) navigator.clipboard.writeText(code.textContent).then(said, byHand); else byHand();
  });

  const table = byId("tensors");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const levels = Array.from(data.levels, (level) => parseInt(level, 36));
  const tensor = data.filters.map((filter) => filter >= 0);
  const parents = [];
  const above = [];
  levels.forEach((level, index) => {
    parents.push(level ? above[level - 1] : -1);
    above[level] = index;
  });
  const total = tensor.filter(Boolean).length;
  const texts = rows.map((row) => Array.from(row.cells).slice(0, 3).map((cell) => cell.textContent).join(" ").toLowerCase());
  const open = tensor.map((is) => !is);
  const most = 500;
  const state = { words: [], filter: -1, column: -1, down: false, tree: true, limit: most };
  const more = byId("more");
  let sorted = rows.map((row, index) => index);
  const places = () => sorted;

  const plain = () => state.tree && state.column < 0 && !state.words.length && state.filter < 0;
  const collator = new Intl.Collator("en", { numeric: true });

  const close = () => body.querySelectorAll("tr.detail").forEach((row) => row.remove());

  const show = () => {
    close();
    const folding = state.tree && state.column < 0;
    table.classList.toggle("folding", folding);
    let count = 0;
    const wanted = rows.map((row, index) => {
      const kept = tensor[index] && (state.filter < 0 || data.filters[index] === state.filter)
        && state.words.every((word) => texts[index].includes(word));
      if (kept) count += 1;
      return kept;
    });
    const seen = wanted.slice();
    if (folding) {
      for (let index = rows.length - 1; index >= 0; index -= 1) if (seen[index] && parents[index] >= 0) seen[parents[index]] = true;
    }
    const inside = [];
    const visible = [];
    rows.forEach((row, index) => {
      const parent = parents[index];
      inside[index] = parent < 0 || (inside[parent] && open[parent]);
      visible[index] = seen[index] && (!plain() || inside[index]);
      if (!tensor[index]) row.setAttribute("aria-expanded", String(!plain() || open[index]));
    });
    let room = state.limit;
    let left = 0;
    places().forEach((index) => {
      const fits = visible[index] && room > 0;
      if (fits) room -= 1; else if (visible[index]) left += 1;
      rows[index].hidden = !fits;
    });
    more.hidden = !left;
    more.textContent = `Show ${left.toLocaleString("en")} more rows`;
    byId("shown").textContent = count === total ? `${total.toLocaleString("en")} tensors`
      : `${count.toLocaleString("en")} of ${total.toLocaleString("en")} tensors`;
  };

  const alike = rows.map((row) => Boolean(row.querySelector("em")));
  const hides = [];
  levels.forEach((level, index) => { hides[index] = parents[index] >= 0 && (alike[parents[index]] || hides[parents[index]]); });
  const unfoldSome = () => {
    open.fill(false);
    let count = levels.filter((level) => level === 0).length;
    for (let level = 0; level < 12; level += 1) {
      const below = levels.filter((one, index) => one === level + 1 && !hides[index]).length;
      if (!below || count + below > 80) break;
      count += below;
      levels.forEach((one, index) => { if (one === level && !tensor[index] && !alike[index]) open[index] = true; });
    }
  };

  const order = () => {
    const places = rows.map((row, index) => index);
    sorted = places;
    if (state.column >= 0) {
      const numbers = state.column > 0 ? data.numbers[state.column - 1] : 0;
      const sign = state.down ? -1 : 1;
      const key = numbers || rows.map((row) => row.cells[state.column].textContent);
      places.sort((one, two) => {
        const [x, y] = [key[one], key[two]];
        if (numbers) {
          if (x === null || y === null) return (x === null) - (y === null) || one - two;
          return sign * (x - y) || one - two;
        }
        return sign * collator.compare(x, y) || one - two;
      });
    }
    body.remove();
    body.append(...places.map((place) => rows[place]));
    table.append(body);
  };

  const heads = Array.from(table.tHead.rows[0].cells);
  more.addEventListener("click", () => { state.limit = Infinity; show(); });
  const sortBy = (column, down) => {
    state.limit = most;
    state.column = column;
    state.down = down;
    heads.forEach((head, index) => {
      if (index === column) head.setAttribute("aria-sort", down ? "descending" : "ascending"); else head.removeAttribute("aria-sort");
    });
    byId("tree").setAttribute("aria-pressed", String(state.tree && column < 0));
    close();
    order();
    show();
  };
  heads.forEach((head, index) => head.querySelector("button").addEventListener("click", () => {
    const numeric = index > 0 && data.numbers[index - 1];
    if (state.column !== index) sortBy(index, Boolean(numeric));
    else if (state.down === Boolean(numeric)) sortBy(index, !state.down);
    else sortBy(-1, false);
  }));

  const search = byId("search");
  search.addEventListener("input", () => { state.words = search.value.toLowerCase().split(/\s+/).filter(Boolean); state.limit = most; show(); });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && event.target !== search) { event.preventDefault(); search.focus(); }
    if (event.key === "Escape" && event.target === search) { search.value = ""; state.words = []; show(); }
  });
  const filters = Array.from(document.querySelectorAll("[data-filter]"));
  filters.forEach((button) => button.addEventListener("click", () => {
    state.filter = Number(button.dataset.filter);
    state.limit = most;
    filters.forEach((one) => one.setAttribute("aria-pressed", String(one === button)));
    show();
  }));
  byId("tree").addEventListener("click", () => {
    state.tree = state.column >= 0 || !state.tree;
    sortBy(-1, false);
  });
  const openAll = (is) => () => { state.tree = true; open.forEach((was, index) => { open[index] = is && !tensor[index]; }); sortBy(-1, false); };
  byId("fold").addEventListener("click", openAll(false));
  byId("unfold").addEventListener("click", openAll(true));

  const make = (name, kind, ...content) => {
    const element = document.createElement(name);
    if (kind) element.className = kind;
    element.append(...content);
    return element;
  };
  const letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  const chart = (sides, what, low, high) => {
    const space = byId("blank").namespaceURI;
    const svg = document.createElementNS(space, "svg");
    svg.setAttribute("class", "hist");
    svg.setAttribute("viewBox", "0 0 240 64");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", what);
    sides.filter(([bars]) => bars).forEach(([bars, kind]) => {
      const path = document.createElementNS(space, "path");
      const step = 240 / bars.length;
      const points = Array.from(bars, (bar, index) => `V${64 - letters.indexOf(bar) * 60 / 63}H${(index + 1) * step}`);
      path.setAttribute("class", kind);
      path.setAttribute("d", `M0 64${points.join("")}V64Z`);
      svg.append(path);
    });
    return make("figure", "", svg, make("div", "axis", make("span", "", low), make("span", "what", what), make("span", "", high)));
  };
  const detail = (index) => {
    const [low, high, a, b, lowest, highest, apart, ofA, ofB, ofApart, absolute] = data.charts[data.details[index]];
    const both = ofA && ofB;
    const what = [absolute ? "absolute values" : both ? "" : "values", both ? "A and B" : ""].filter(Boolean).join(", ");
    const charts = make("div", "charts", chart([[a, "ha"], [b, "hb"]], what, low, high));
    if (ofApart) charts.append(chart([[apart, "hd"]], "B \u2212 A", lowest, highest));
    const numbers = make("table", "", make("thead", "", make("tr", "", ...["", ...data.columns].map((name) => make("th", name ? "n" : "", name)))));
    const lines = make("tbody", "");
    [[both ? "A" : "values", ofA], [both ? "B" : "values", ofB], ["B \u2212 A", ofApart]].filter((row) => row[1]).forEach(([name, values]) => {
      lines.append(make("tr", "", make("th", "", name), ...values.map((value) => make("td", "n", value))));
    });
    numbers.append(lines);
    const cell = make("td", "", make("h3", "", rows[index].cells[0].textContent), charts, numbers);
    cell.colSpan = heads.length;
    return make("tr", "detail", cell);
  };
  const numberOf = new Map(rows.map((row, index) => [row, index]));
  const act = (row) => {
    const index = numberOf.get(row);
    if (index === undefined) return;
    if (!tensor[index]) {
      if (!plain()) return;
      open[index] = !open[index];
      show();
    } else if (data.details && data.details[index] >= 0) {
      const next = row.nextElementSibling;
      if (next && next.classList.contains("detail")) next.remove(); else row.after(detail(index));
    }
  };
  rows.forEach((row) => { if (row.matches(".m, .d")) row.tabIndex = 0; });
  body.addEventListener("click", (event) => {
    if (!String(getSelection())) act(event.target.closest("tr"));
  });
  body.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    act(event.target.closest("tr"));
  });
  unfoldSome();
  show();
})();
