// Curves with uPlot, in the colours of the theme. The palette is Okabe and Ito's, which colour-blind people can tell apart.

import { h, number, percent as share, short } from "./dom.js";

const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#aa4499", "#b07900", "#3399cc", "#666666"];
const DARK = ["#56b4e9", "#ff9e57", "#3ddbb0", "#e79ac6", "#f0c94a", "#9ad0f5", "#b0b7c0"];
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3], [4, 4], [1, 2], [10, 4]];
const BINS = 100;
const STEPS = [0, 1, 2, 3, 4, 5].flatMap((power) => [1, 2, 5].map((n) => n * 10 ** power));
const live = new Set();

// Areas are drawn over at most BINS points: neighbours are averaged.
function bin(values) {
  const width = Math.ceil(values.length / BINS);
  if (width <= 1) return values;
  return Array.from({ length: Math.ceil(values.length / width) }, (_, i) => {
    const part = values.slice(i * width, (i + 1) * width).filter((v) => v !== null && v !== undefined);
    return part.length ? part.reduce((a, b) => a + b, 0) / part.length : null;
  });
}

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function redrawAll() {
  for (const chart of live) chart.draw();
}

// title, x: numbers, series: [{label, values, points}], stacked, percent
export function chart(title, { height = 210, stacked = false, percent = false, note = "" } = {}) {
  const frame = h("div", { class: "chart-frame" });
  const box = h("figure", { class: "chart" }, h("figcaption", {}, title, note ? h("span", { class: "dim" }, ` ${note}`) : null), frame);
  let plot = null;
  let data = { x: [], series: [] };
  const self = {
    element: box,
    set(x, series) {
      const given = series.filter((s) => s.values.some((v) => (stacked ? v > 0 : v !== null && v !== undefined)));
      if (stacked) [x, series] = [bin(x), given.map((s) => ({ ...s, values: bin(s.values) }))];
      const drawn = stacked ? series : given;
      const same = plot && drawn.length === data.series.length && drawn.every((s, i) => s.label === data.series[i].label);
      data = { x, series: drawn };
      if (same) plot.setData(columns());
      else self.draw();
      return self;
    },
    draw() {
      plot?.destroy();
      plot = null;
      frame.replaceChildren();
      if (!data.x.length || !data.series.length) {
        frame.append(h("p", { class: "dim empty" }, "no data"));
        return;
      }
      plot = new uPlot(options(), columns(), frame);
    },
    destroy() {
      live.delete(self);
      watch.disconnect();
      plot?.destroy();
    },
  };
  function columns() {
    if (!stacked) return [data.x, ...data.series.map((s) => s.values)];
    const sums = data.x.map((_, i) => data.series.reduce((sum, s) => sum + (s.values[i] || 0), 0));
    const below = data.x.map(() => 0);
    const tops = data.series.map((s) => s.values.map((v, i) => {
      below[i] += (v || 0) / (percent ? sums[i] || 1 : 1);
      return below[i];
    }));
    return [data.x, ...tops.reverse()];
  }
  function options() {
    const palette = isDark() ? DARK : LIGHT;
    const shown = stacked ? [...data.series].reverse() : data.series;
    const axis = { stroke: css("--dim"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") }, font: "12px system-ui" };
    // as many digits as tell two ticks apart; equal values do not make a scale of their own
    const text = (raw, by) => (percent ? `${Math.round(100 * raw)}%` : by < 1 ? number(raw, Math.min(9, String(by).split(".")[1]?.length ?? Math.ceil(-Math.log10(by)))) : short(raw));
    const range = (_, min, max) => (min === max ? [Math.min(min, 0), Math.max(max, 0) || 1] : uPlot.rangeNum(min, max, 0.1, true));
    const width = (_, texts) => Math.max(62, 20 + 7 * Math.max(0, ...(texts ?? []).map((t) => t?.length ?? 0)));
    const sum = (at) => data.series.reduce((all, s) => all + (s.values[at] || 0), 0);
    return {
      width: Math.max(200, frame.clientWidth),
      height,
      cursor: { drag: { x: true, y: false }, points: { size: 6 } },
      scales: { x: { time: false, range: (_, min, max) => (min === max ? [min - 1, max + 1] : [min, max]) }, y: stacked ? { range: (_, __, max) => [0, percent ? 1 : max * 1.05 || 1] } : { range } },
      axes: [{ ...axis, incrs: STEPS }, { ...axis, size: width, values: (_, ticks, __, ___, by) => ticks.map((t) => text(t, by)) }],
      legend: { live: true },
      series: [
        { label: "step", value: (_, v) => short(v ?? data.x.at(-1)) },
        ...shown.map((s, i) => {
          const at = stacked ? data.series.length - 1 - i : i;
          const colour = palette[at % palette.length];
          return {
            label: s.label,
            stroke: colour,
            width: stacked ? 1 : 1.8,
            dash: stacked ? [] : DASHES[at % DASHES.length],
            fill: stacked ? colour : undefined,
            spanGaps: true,
            points: { show: s.points || data.x.length < 30, size: 5, fill: colour },
            value: (_, v, __, index) => {
              const series = data.series[at];
              // without a pointer the legend shows the newest values
              const place = index ?? data.x.length - 1;
              return percent ? share(series.values[place] / sum(place)) : short(series.values[place]);
            },
          };
        }),
      ],
    };
  }
  const watch = new ResizeObserver(() => {
    if (plot && frame.clientWidth) plot.setSize({ width: frame.clientWidth, height });
  });
  watch.observe(frame);
  live.add(self);
  return self;
}
