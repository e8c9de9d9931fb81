"use strict";
// The curves of all runs. Nothing is fetched: the data stand in the page.
const data = JSON.parse(document.getElementById("data").textContent);
const state = { axis: "update", smoothing: 0, points: true, marks: true, hidden: new Set() };
const AXES = { update: "update", samples: "training samples", time: "time spent" };
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const MARKS = { resume: "circle", skip: "x", roll_back: "triangle-left", end_phase: "square",
                fit_memory: "diamond", stage: "line-ns" };
const FEW = 40; // points of a curve that are drawn as such

const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The mean of the values before, each of which counts less by the factor; corrected at the beginning.
function smooth(values, factor) {
  if (!factor) return values;
  let sum = 0, weight = 0;
  return values.map(value => {
    if (value === null) return null;
    sum = factor * sum + (1 - factor) * value;
    weight = factor * weight + (1 - factor);
    return sum / weight;
  });
}

function seconds(value) {
  const whole = Math.round(value), two = number => String(number).padStart(2, "0");
  if (whole < 60) return value < 10 ? value.toFixed(1) + " s" : whole + " s";
  if (whole < 3600) return Math.floor(whole / 60) + ":" + two(whole % 60) + " min";
  return Math.floor(whole / 3600) + ":" + two(Math.floor(whole / 60) % 60) + " h";
}


function curve(panel, run, series) {
  const points = series.kind === "log points", several = panel.faint;
  if (points && several && !state.points) return null;
  const thin = points && several && !state.smoothing;
  const where = series.phase + (points ? ", log points" : "") + (series.label ? " " + series.label : "");
  const dash = several || !points ? panel.phases.indexOf(series.phase) : panel.labels.indexOf(series.label);
  return {
    x: series[state.axis], y: smooth(series.values, points ? state.smoothing : 0),
    mode: !points && series.values.length <= FEW ? "lines+markers" : "lines",
    line: { color: run.colour, width: thin ? 1 : 1.8, dash: thin ? "solid" : DASHES[Math.max(0, dash) % DASHES.length] },
    marker: { size: 4.5 }, opacity: thin ? 0.35 : 1, connectgaps: false,
    name: run.name, customdata: state.axis === "time" ? series.time.map(seconds) : series[state.axis],
    hovertemplate: `${run.name}, ${where}<br>%{customdata} · %{y:.5~g}<extra></extra>`.replace("%{customdata}",
      state.axis === "time" ? "%{customdata}" : "%{customdata:,}"),
  };
}

// Resumes, skips and the like of one run, on its own curve.
function marks(panel, run) {
  const own = run.series.filter(series => series.panel === panel.name);
  const base = own.find(series => series.kind === "log points") || own[0];
  if (!state.marks || !base || !run.events.length) return null;
  const values = smooth(base.values, base.kind === "log points" ? state.smoothing : 0);
  const near = event => { // on the curve, between the points before and after
    const after = base.update.findIndex(update => update >= event.update);
    if (after <= 0) return values[after < 0 ? values.length - 1 : 0];
    const [from, to] = [base.update[after - 1], base.update[after]];
    const [low, high] = [values[after - 1], values[after]];
    return low === null || high === null ? high ?? low : low + (high - low) * (event.update - from) / (to - from);
  };
  return {
    x: run.events.map(event => event[state.axis]), y: run.events.map(near),
    mode: "markers", name: run.name, text: run.events.map(event => event.text),
    marker: { symbol: run.events.map(event => MARKS[event.kind] || "circle"), size: 9, color: colour("--card"),
              line: { color: run.colour, width: 2 } },
    hovertemplate: `${run.name}: %{text}<extra></extra>`,
  };
}

function traces(panel) {
  const shown = data.runs.filter(run => !state.hidden.has(run.name));
  const curves = shown.flatMap(run => run.series.filter(series => series.panel === panel.name)
    .map(series => curve(panel, run, series)));
  return [...curves, ...shown.map(run => marks(panel, run))].filter(trace => trace);
}

function timeTicks() {
  const last = Math.max(1, ...data.runs.map(run => run.seconds));
  const steps = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400];
  const step = steps.find(one => last / one <= 6) || Math.ceil(last / 6 / 86400) * 86400;
  const values = Array.from({ length: Math.floor(last / step) + 1 }, (_, number) => number * step);
  return { tickvals: values, ticktext: values.map(seconds) };
}

// 1, 2 and 5 of each power of ten, each written in full.
const LOG_TICKS = (() => {
  const values = Array.from({ length: 25 }, (_, number) => number - 12)
    .flatMap(power => [1, 2, 5].map(digit => Number(`${digit}e${power}`)));
  return { tickvals: values, ticktext: values.map(String) };
})();

function layout(panel) {
  const axis = { gridcolor: colour("--grid"), linecolor: colour("--line"), zeroline: false, automargin: true };
  return {
    margin: { l: 8, r: 14, t: 10, b: 8 }, showlegend: false, hovermode: "closest",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 11, color: colour("--quiet") },
    xaxis: { ...axis, title: { text: AXES[state.axis], standoff: 6 },
             ...(state.axis === "time" ? timeTicks() : { exponentformat: "none", separatethousands: true }) },
    yaxis: { ...axis, nticks: 6, ...(panel.logarithmic ? { type: "log", ...LOG_TICKS } : {}) },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--line"), activecolor: colour("--accent") },
    uirevision: state.axis, // a zoom stays while the axis does
  };
}

const options = { responsive: true, displaylogo: false, doubleClick: "reset",
                  modeBarButtons: [["toImage", "pan2d", "zoom2d", "resetScale2d"]] };

function draw() {
  data.panels.forEach((panel, number) =>
    Plotly.react(`plot-${number}`, traces(panel), layout(panel), options));
}

for (const input of document.querySelectorAll("#axis input")) {
  input.addEventListener("change", () => { state.axis = input.value; draw(); });
}
const slider = document.getElementById("smoothing");
slider.addEventListener("input", () => {
  state.smoothing = Number(slider.value);
  document.getElementById("smoothed").textContent = slider.value;
  draw();
});
for (const key of ["points", "marks"]) {
  const box = document.getElementById(key);
  box.addEventListener("change", () => { state[key] = box.checked; draw(); });
}
for (const box of document.querySelectorAll("#runs input[type=checkbox]")) {
  box.addEventListener("change", () => {
    const name = data.runs[Number(box.value)].name;
    state.hidden[box.checked ? "delete" : "add"](name);
    box.closest("tr").classList.toggle("off", !box.checked);
    draw();
  });
}
for (const head of document.querySelectorAll("#runs thead th")) {
  head.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const body = head.closest("table").tBodies[0];
    const key = row => row.children[head.cellIndex].dataset.value ?? "";
    const compare = (a, b) => {
      const [one, two] = [key(a), key(b)];
      if (one === "" || two === "") return (one === "") - (two === ""); // nothing to say: last
      const numbers = Number(one) - Number(two);
      return (up ? 1 : -1) * (Number.isNaN(numbers) ? one.localeCompare(two) : numbers);
    };
    body.append(...[...body.rows].sort(compare));
  });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
document.body.dataset.drawn = "yes";
