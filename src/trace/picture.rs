//! A stretch of a timeline as an SVG picture: a row per track, colours by part, waits hatched, the
//! critical path outlined.

use std::collections::BTreeSet;
use std::fmt::Write;

use crate::compose::Part;

use super::event::Span;
use super::timeline::{Kind, Slice, Timeline, TrackId};

// Layout, in pixels.
const WIDTH: f64 = 1200.0;
const LABELS: f64 = 165.0;
const MARGIN: f64 = 16.0;
const TITLE: f64 = 30.0;
const AXIS: f64 = 24.0;
const ROW: f64 = 22.0;
const BAR: f64 = 16.0;
const GROUP_GAP: f64 = 10.0;
const LEGEND_LINE: f64 = 20.0;
/// Bars wider than this end a little early, so that neighbours can be told apart.
const SEAM_FROM: f64 = 3.0;
const SEAM: f64 = 0.7;
/// Width of a character of the small font, at most.
const CHARACTER: f64 = 6.2;

struct Row {
    track: TrackId,
    top: f64,
}

struct Scale {
    window: Span,
}

impl Scale {
    fn x(&self, ns: i64) -> f64 {
        let inside = ns.clamp(self.window.start_ns, self.window.end_ns) - self.window.start_ns;
        LABELS + inside as f64 / self.window.ns() as f64 * (WIDTH - LABELS - MARGIN)
    }

    fn shows(&self, span: Span) -> bool {
        span.end_ns > self.window.start_ns && span.start_ns < self.window.end_ns
    }
}

/// Draws what lies within `window`, which must not be empty. Times count from its start.
pub fn draw(timeline: &Timeline, window: Span, title: &str) -> String {
    let scale = Scale { window };
    let shown: Vec<&Slice> = (timeline.slices().iter())
        .filter(|slice| scale.shows(slice.span))
        .collect();
    let used: BTreeSet<TrackId> = shown.iter().map(|slice| slice.track).collect();
    let mut body = String::new();
    let mut rows: Vec<Row> = Vec::new();
    let mut top = TITLE + AXIS;
    let mut group = None;
    for (track, process, name) in timeline.tracks().filter(|(id, ..)| used.contains(id)) {
        if group.is_some_and(|known| known != process) {
            top += GROUP_GAP;
        }
        group = Some(process);
        let label = escape(&format!("{process} · {name}"));
        text(&mut body, MARGIN, top + BAR - 4.0, "label", &label);
        rows.push(Row { track, top });
        top += ROW;
    }
    let axis = axis(&scale, top);
    for row in &rows {
        bars(&mut body, &scale, row, &shown);
    }
    for path in timeline.paths() {
        let path: Vec<&Slice> = (path.iter().map(|slice| timeline.get(*slice)))
            .filter(|slice| scale.shows(slice.span))
            .collect();
        outline(&mut body, &scale, &rows, &path);
    }
    let kinds: BTreeSet<Kind> = shown.iter().map(|slice| slice.kind).collect();
    let (legend, bottom) = legend(&kinds, top + 24.0);
    let height = bottom + MARGIN;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         width=\"{WIDTH}\" height=\"{height}\" role=\"img\">\n<title>{title}</title>\n{STYLE}\n\
         <rect class=\"card\" width=\"{WIDTH}\" height=\"{height}\" rx=\"6\"/>\n\
         <text class=\"title\" x=\"{MARGIN}\" y=\"22\">{title}</text>\n{axis}{body}{legend}</svg>\n",
        title = escape(title),
    )
}

/// Text follows the reader's theme; the colours of parts hold on both grounds.
const STYLE: &str = "<defs><pattern id=\"wait\" width=\"5\" height=\"5\" \
patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
<rect width=\"5\" height=\"5\" fill=\"#9aa1a9\" fill-opacity=\".18\"/>\
<rect width=\"1.6\" height=\"5\" fill=\"#868e97\"/></pattern></defs>\n\
<style>text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;\
font-size:11px;fill:#1f2328}.title{font-size:14px;font-weight:600}.in{fill:#fff}\
.card{fill:#fff}.grid{stroke:#d0d7de;stroke-width:1}.path{fill:none;stroke:#c2185b;\
stroke-width:1.6}.hop{stroke-dasharray:3 2}\n\
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.card{fill:#0d1117}\
.grid{stroke:#30363d}.path{stroke:#ff79b0}}</style>";

/// The fill of a kind.
fn fill(kind: Kind) -> &'static str {
    match kind {
        Kind::PeerWait | Kind::GpuWait => "url(#wait)",
        Kind::Iteration => "#5d6b7a",
        Kind::Prefill => "#3d8fa6",
        Kind::Decode => "#7f9c6a",
        Kind::Part(part) => match part {
            Part::HostPrepare => "#7d6bb3",
            Part::HostDispatch => "#2f74b5",
            Part::GraphLaunch => "#4a90a4",
            Part::HostFinish => "#8f7fc0",
            Part::Kernel => "#3f9142",
            Part::Transfer => "#d9822b",
            Part::QueueIteration
            | Part::QueueBatchWait
            | Part::QueueBalance
            | Part::QueueCapacity => "#b8962e",
            Part::ClientTransport | Part::Ingress | Part::Egress => "#8a6d5c",
        },
    }
}

/// A grid line per tick and its time.
fn axis(scale: &Scale, bottom: f64) -> String {
    let step_ns = tick_ns(scale.window.ns());
    // The decimals that tell neighbouring ticks apart.
    let digits = (0..7_usize)
        .find(|digits| step_ns % 10_i64.pow(6 - *digits as u32) == 0)
        .unwrap_or(6);
    let mut out = String::new();
    let mut at = 0;
    while at <= scale.window.ns() {
        let x = scale.x(scale.window.start_ns + at);
        let y = TITLE + AXIS - 6.0;
        let _ = writeln!(
            out,
            "<path class=\"grid\" d=\"M{x:.1} {:.1}V{bottom:.1}\"/>",
            y + 2.0
        );
        let label = format!("{:.digits$}", at as f64 / 1e6);
        let unit = if at == 0 { " ms" } else { "" };
        text(&mut out, x + 3.0, y, "tick", &format!("{label}{unit}"));
        at += step_ns;
    }
    out
}

/// A round step that gives five to twelve ticks.
fn tick_ns(window_ns: i64) -> i64 {
    let mut step = 1;
    loop {
        for factor in [1, 2, 5] {
            if window_ns / (step * factor) <= 11 {
                return step * factor;
            }
        }
        step *= 10;
    }
}

fn bars(out: &mut String, scale: &Scale, row: &Row, shown: &[&Slice]) {
    let of_row = || shown.iter().filter(|slice| slice.track == row.track);
    let kinds: BTreeSet<Kind> = of_row().map(|slice| slice.kind).collect();
    for kind in kinds {
        let mut path = String::new();
        for slice in of_row().filter(|slice| slice.kind == kind) {
            let from = scale.x(slice.span.start_ns);
            let mut to = scale.x(slice.span.end_ns);
            if to - from > SEAM_FROM {
                to -= SEAM;
            }
            let _ = write!(
                path,
                "M{from:.2} {:.1}h{:.2}v{BAR}H{from:.2}z",
                row.top,
                to - from
            );
        }
        let _ = writeln!(out, "<path fill=\"{}\" d=\"{path}\"/>", fill(kind));
    }
    for slice in of_row() {
        let (from, to) = (scale.x(slice.span.start_ns), scale.x(slice.span.end_ns));
        if slice.name.chars().count() as f64 * CHARACTER + 6.0 < to - from {
            let class = if slice.kind.waits() { "wait" } else { "in" };
            text(
                out,
                from + 4.0,
                row.top + BAR - 4.0,
                class,
                &escape(&slice.name),
            );
        }
    }
}

/// Outlines what the path covers of each row, and joins the pieces where it changes rows.
fn outline(out: &mut String, scale: &Scale, rows: &[Row], path: &[&Slice]) {
    let mut before: Option<(f64, f64)> = None;
    for leg in path.chunk_by(|a, b| a.track == b.track) {
        let Some(row) = rows.iter().find(|row| row.track == leg[0].track) else {
            continue;
        };
        let from = scale.x(leg[0].span.start_ns);
        let to = scale.x(leg[leg.len() - 1].span.end_ns);
        let _ = writeln!(
            out,
            "<rect class=\"path\" x=\"{from:.2}\" y=\"{:.1}\" width=\"{:.2}\" height=\"{:.1}\"/>",
            row.top - 1.0,
            to - from,
            BAR + 2.0
        );
        let middle = row.top + BAR / 2.0;
        if let Some((x, y)) = before {
            let _ = writeln!(
                out,
                "<path class=\"path hop\" d=\"M{x:.2} {y:.1}L{from:.2} {middle:.1}\"/>"
            );
        }
        before = Some((to, middle));
    }
}

/// What the colours mean, from `top` on; also where it ends.
fn legend(kinds: &BTreeSet<Kind>, top: f64) -> (String, f64) {
    let mut out = String::new();
    let (mut x, mut y) = (MARGIN, top);
    let mut place = |width: f64| {
        if x + width > WIDTH - MARGIN {
            (x, y) = (MARGIN, y + LEGEND_LINE);
        }
        let at = (x, y);
        x += width;
        at
    };
    for kind in kinds {
        let name = kind.name().replace('_', " ");
        let (x, y) = place(name.chars().count() as f64 * CHARACTER + 36.0);
        let _ = writeln!(
            out,
            "<rect fill=\"{}\" x=\"{x}\" y=\"{:.1}\" width=\"14\" height=\"11\"/>",
            fill(*kind),
            y - 9.0
        );
        text(&mut out, x + 19.0, y, "key", &name);
    }
    let (x, y) = place(130.0);
    let _ = writeln!(
        out,
        "<rect class=\"path\" x=\"{x}\" y=\"{:.1}\" width=\"14\" height=\"11\"/>",
        y - 9.0
    );
    text(&mut out, x + 19.0, y, "key", "critical path");
    (out, y)
}

fn text(out: &mut String, x: f64, y: f64, class: &str, escaped: &str) {
    let _ = writeln!(
        out,
        "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{escaped}</text>"
    );
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
