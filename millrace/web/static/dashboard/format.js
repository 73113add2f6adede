// Numbers for people.

const scaled = (value, units, base) => {
  let at = 0;
  while (Math.abs(value) >= base && at < units.length - 1) { value /= base; at++; }
  return `${value >= 100 || Number.isInteger(value) ? Math.round(value) : value >= 10 ? value.toFixed(1).replace(/\.0$/, "") : value.toFixed(2).replace(/0$/, "").replace(/\.0$/, "")}${units[at]}`;
};

export const count = value => scaled(value, ["", "k", "M", "G", "T", "P"], 1000);
export const share = value => `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
export const seconds = value => (value === 0 ? "0" : value < 0.001 ? `${Math.round(value * 1e6)} µs` : value < 1 ? `${+(value * 1000).toPrecision(3)} ms` : value < 90 ? `${+value.toPrecision(3)} s` : duration(value));
export const milliseconds = value => seconds(value / 1000);

export function duration(value) {
  const whole = Math.floor(value), days = Math.floor(whole / 86400), hours = Math.floor(whole / 3600) % 24, minutes = Math.floor(whole / 60) % 60;
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}
