// Tables are sorted and filtered here; the state is in the address: #board.q=gemm&board.sort=-3
"use strict";
(() => {
  const state = () => new URLSearchParams(location.hash.slice(1));
  const number = (cell) => parseFloat(cell.textContent.replace(/^[~<\s]+/, "").replace(/,/g, ""));
  const boxes = [...document.querySelectorAll("div.table")].map((root) => ({
    root, input: root.querySelector("input"), count: root.querySelector("output"),
    heads: [...root.querySelectorAll("thead th")], body: root.querySelector("tbody"),
    rows: [...root.querySelectorAll("tbody tr")],
  }));
  const save = (key, value) => {
    const all = state();
    if (value) all.set(key, value); else all.delete(key);
    history.replaceState(null, "", "#" + all);
    show();
  };
  function show() {
    const all = state();
    for (const { root, input, count, heads, body, rows } of boxes) {
      const query = all.get(root.id + ".q") || "";
      if (input.value !== query) input.value = query;
      const folded = root.closest("details");
      if (folded && (query || all.get(root.id + ".sort"))) folded.open = true;
      const words = query.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const content = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => content.includes(word));
        shown += !row.hidden;
      }
      count.textContent = `${shown} of ${rows.length} rows`;
      const sort = parseInt(all.get(root.id + ".sort") || "0", 10);
      const column = Math.abs(sort) - 1, sign = Math.sign(sort);
      heads.forEach((head, i) => head.setAttribute(
        "aria-sort", i !== column ? "none" : sign > 0 ? "ascending" : "descending"));
      let ordered = rows;
      if (sort && heads[column]) {
        const numeric = heads[column].classList.contains("n");
        const keyed = rows.map((row) => [
          numeric ? number(row.cells[column]) : row.cells[column].textContent, row]);
        keyed.sort(([a], [b]) => {
          if (!numeric) return sign * a.localeCompare(b, "en", { numeric: true });
          if (isNaN(a) || isNaN(b)) return isNaN(a) - isNaN(b);  // empty cells come last
          return sign * (a - b);
        });
        ordered = keyed.map(([, row]) => row);
      }
      body.append(...ordered);
    }
  }
  for (const { root, input, heads } of boxes) {
    input.addEventListener("input", () => save(root.id + ".q", input.value));
    heads.forEach((head, i) => head.querySelector("button").addEventListener("click", () => {
      const next = head.getAttribute("aria-sort") === "descending" ? i + 1 : -(i + 1);
      save(root.id + ".sort", String(next));
    }));
  }
  function open() {  // what the address links to, if that is folded
    const target = document.getElementById(location.hash.slice(1));
    if (target && target.tagName === "DETAILS") { target.open = true; target.scrollIntoView(); }
    return target;
  }
  addEventListener("hashchange", () => { if (!open()) show(); });
  open();
  show();
})();
