//! The plot as SVG, with the whole title, round ticks, the spread of the runs, and the reason of each choice.

use std::fmt::Write;

use super::super::Report;
use super::super::curve::Point;
use super::super::file::Hardware;
use super::super::plan::{NEARLY_ALL, TunedChoice};
use super::{Axes, AxisScale, Curves, is_chosen, lines, millis};

/// Width of the SVG in pixels, and height of the area of the curves.
const WIDTH: f64 = 860.0;
const AREA_HEIGHT: f64 = 380.0;
/// Space at the sides of the curves, and below them for the numbers and the name of the axis.
const SIDE: f64 = 84.0;
const AXIS_HEIGHT: f64 = 58.0;
/// Height of a line of text.
const LINE_HEIGHT: f64 = 19.0;
/// Characters of a line of text, at its width in a wide font.
const LINE_CHARACTERS: usize = 110;
/// Maximum ticks of the throughput axis.
const SPEED_TICKS_MAX: f64 = 7.0;
/// Colours of the lines, one for each precision; labels distinguish them without colours.
const COLOURS: [&str; 4] = ["#1f5fa8", "#c4561a", "#3b7d3b", "#7a4fa0"];

/// Renders the plot as SVG.
pub fn svg(report: &Report) -> String {
    let Report { tuned, points, file, .. } = report;
    let Hardware { processor, cores, instruction_set } = &tuned.hardware;
    let lines = lines(points, &tuned.choices);
    let mut text = SvgText::default();
    text.lines(
        &format!("Throughput and time of a batch: {}", tuned.source),
        "font-size=\"16\" font-weight=\"bold\"",
    );
    text.lines(&format!("{processor}, {cores} cores, {instruction_set}"), "fill=\"#555\"");
    if let Some(share) = tuned.busy_share {
        let kept = if file.is_some() { "kept on request" } else { "not kept" };
        let used = format!(
            "Not valid for this machine: other processes used {:.0} % of the CPU time meanwhile. The settings were {kept}.",
            100.0 * share
        );
        text.lines(&used, "fill=\"#b3261e\" font-weight=\"bold\"");
    }
    text.y += 14.0;
    let mut drawing = String::new();
    if let Some(axes) = SvgAxes::around(&lines, text.y) {
        axes.draw(&mut drawing);
        for (number, ((precision, line), colour)) in lines.iter().zip(COLOURS.iter().cycle()).enumerate() {
            axes.draw_line(&mut drawing, &precision.to_string(), line, colour, &tuned.choices, number == 0);
        }
        text.y += AREA_HEIGHT + AXIS_HEIGHT;
        text.lines(
            "Numbers at the points: tokens of a batch. Bars: slowest and fastest run; points: their median.",
            "fill=\"#555\"",
        );
        for choice in &tuned.choices {
            text.lines(&explanation(choice, lines.get(&choice.precision).map_or(&[], Vec::as_slice)), "");
        }
    }
    let height = text.y;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
         font-size=\"13\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n{}{drawing}</svg>\n",
        text.svg
    )
}

/// Explains in one sentence why a setting was chosen.
fn explanation(choice: &TunedChoice, line: &[&Point]) -> String {
    let TunedChoice { precision, threads, batch, tokens_per_second, target_met } = choice;
    let tokens = batch.batch_tokens;
    let noun = if threads.get() == 1 { "thread" } else { "threads" };
    let chosen = format!("● {precision}, {threads} {noun}: {} tokens chosen", grouped(tokens as f64));
    let among = match target_met {
        None => "",
        Some(true) => " among those that meet the latency target",
        Some(false) => {
            return format!("{chosen}; no budget meets the latency target, and this one comes closest.");
        }
    };
    let best = line.iter().max_by(|a, b| a.tokens_per_second.total_cmp(&b.tokens_per_second));
    let fastest = match best {
        Some(best) if target_met.is_none() && best.setting.batch_tokens != tokens => {
            format!(
                " of {} ({} tokens/s)",
                grouped(best.setting.batch_tokens as f64),
                grouped(best.tokens_per_second)
            )
        }
        Some(_) | None => String::new(),
    };
    format!(
        "{chosen}: the smallest budget with at least {:.0} % of the throughput of the fastest{fastest}{among}, {} tokens/s.",
        100.0 * NEARLY_ALL,
        grouped(*tokens_per_second)
    )
}

/// Lines of text, from top to bottom.
struct SvgText {
    svg: String,
    y: f64,
}

impl Default for SvgText {
    fn default() -> SvgText {
        SvgText { svg: String::new(), y: 12.0 }
    }
}

impl SvgText {
    /// Adds a text, broken into as many lines as it needs.
    fn lines(&mut self, text: &str, style: &str) {
        for line in wrapped(text) {
            self.y += LINE_HEIGHT;
            let _ =
                writeln!(self.svg, "<text x=\"20\" y=\"{:.1}\" {style}>{}</text>", self.y, escaped(&line));
        }
    }
}

/// Breaks a text between words, and a word that is longer than a line.
fn wrapped(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        let characters: Vec<char> = word.chars().collect();
        for piece in characters.chunks(LINE_CHARACTERS) {
            let piece: String = piece.iter().collect();
            match lines.last_mut() {
                Some(line) if line.chars().count() + 1 + piece.chars().count() <= LINE_CHARACTERS => {
                    line.push(' ');
                    line.push_str(&piece);
                }
                Some(_) | None => lines.push(piece),
            }
        }
    }
    lines
}

/// Axes that begin and end at round numbers.
struct SvgAxes {
    axes: Axes,
    top: f64,
    /// Milliseconds.
    times: Vec<f64>,
    /// Tokens per second.
    speeds: Vec<f64>,
}

impl SvgAxes {
    /// Returns axes that contain all points and bars; `None` without points.
    fn around(lines: &Curves<'_>, top: f64) -> Option<SvgAxes> {
        let points = || lines.values().flatten();
        let times = || points().map(|point| millis(point));
        let times = time_ticks(times().min_by(f64::total_cmp)?, times().max_by(f64::total_cmp)?);
        let fastest = points().map(|point| point.tokens_per_second_range.1).max_by(f64::total_cmp)?;
        let speeds = speed_ticks(fastest);
        let time = AxisScale { from: times.first()?.ln(), to: times.last()?.ln() };
        let axes = Axes { time, speed: AxisScale { from: 0.0, to: *speeds.last()? } };
        Some(SvgAxes { axes, top, times, speeds })
    }

    /// Returns the pixel of a time and a throughput.
    fn pixel(&self, time_ms: f64, speed: f64) -> (f64, f64) {
        let (across, up) = (self.axes.time.share(time_ms.ln()), self.axes.speed.share(speed));
        (SIDE + across * (WIDTH - 2.0 * SIDE), self.top + (1.0 - up) * AREA_HEIGHT)
    }

    fn draw(&self, svg: &mut String) {
        let (left, right, bottom) = (SIDE, WIDTH - SIDE, self.top + AREA_HEIGHT);
        for time in &self.times {
            let (x, _) = self.pixel(*time, 0.0);
            let _ = writeln!(
                svg,
                "<path d=\"M{x:.1} {:.1}V{bottom:.1}\" stroke=\"#e3e5e8\"/>\n\
                 <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#555\">{time}</text>",
                self.top,
                bottom + 18.0
            );
        }
        for speed in &self.speeds {
            let (_, y) = self.pixel(self.times[0], *speed);
            let _ = writeln!(
                svg,
                "<path d=\"M{left:.1} {y:.1}H{right:.1}\" stroke=\"#e3e5e8\"/>\n\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#555\">{}</text>",
                left - 8.0,
                y + 4.0,
                grouped(*speed)
            );
        }
        let (top, middle) = (self.top, self.top + AREA_HEIGHT / 2.0);
        let _ = writeln!(
            svg,
            "<path d=\"M{left:.1} {top:.1}V{bottom:.1}H{right:.1}\" fill=\"none\" stroke=\"#555\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">milliseconds of a batch (median)</text>\n\
             <text x=\"18\" y=\"{middle:.1}\" text-anchor=\"middle\" transform=\"rotate(-90 18 {middle:.1})\">tokens/s</text>",
            WIDTH / 2.0,
            bottom + 40.0
        );
    }

    /// Draws a curve; the numbers of the first one are above its points, those of the others below.
    fn draw_line(
        &self,
        svg: &mut String,
        name: &str,
        line: &[&Point],
        colour: &str,
        choices: &[TunedChoice],
        is_first: bool,
    ) {
        let place = |point: &Point, speed: f64| self.pixel(millis(point), speed);
        let path = line.iter().map(|point| place(point, point.tokens_per_second));
        let path: Vec<String> = path.map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>",
            path.join(" ")
        );
        for point in line {
            let (slowest, fastest) = point.tokens_per_second_range;
            let ((x, y), (_, low), (_, high)) =
                (place(point, point.tokens_per_second), place(point, slowest), place(point, fastest));
            let (radius, fill) = if is_chosen(point, choices) { (7, colour) } else { (3, "white") };
            let label = if is_first { high - 9.0 } else { low + 18.0 };
            let _ = writeln!(
                svg,
                "<path class=\"spread\" d=\"M{x:.1} {low:.1}V{high:.1}M{:.1} {low:.1}h8M{:.1} {high:.1}h8\" stroke=\"{colour}\"/>\n\
                 <circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{fill}\" stroke=\"{colour}\" stroke-width=\"1.5\"/>\n\
                 <text x=\"{x:.1}\" y=\"{label:.1}\" text-anchor=\"middle\" font-size=\"11\" fill=\"#555\">{}</text>",
                x - 4.0,
                x - 4.0,
                point.setting.batch_tokens
            );
        }
        if let Some(point) = line.last() {
            let (x, y) = place(point, point.tokens_per_second);
            let _ = writeln!(
                svg,
                "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\" font-weight=\"bold\">{name}</text>",
                x + 12.0,
                y + 4.0
            );
        }
    }
}

/// Returns 1, 2, 5, 10 … that span the range, at least two.
fn time_ticks(least: f64, most: f64) -> Vec<f64> {
    let tick = |number: i32| {
        let factor = [1.0, 2.0, 5.0][number.rem_euclid(3) as usize];
        let decade = number.div_euclid(3);
        // Negative powers are divided, so that 0.2 is not 0.20000000000000001.
        if decade < 0 { factor / 10_f64.powi(-decade) } else { factor * 10_f64.powi(decade) }
    };
    let about = (least.log10() * 3.0).floor() as i32;
    let first = (about - 3..=about + 3).rev().find(|number| tick(*number) <= least).unwrap_or(about - 3);
    let mut ticks = vec![tick(first)];
    for number in first + 1.. {
        ticks.push(tick(number));
        if tick(number) >= most {
            break;
        }
    }
    ticks
}

/// Returns round numbers from zero to the first that is above `most`.
fn speed_ticks(most: f64) -> Vec<f64> {
    let least_step = (most / (SPEED_TICKS_MAX - 1.0)).max(f64::MIN_POSITIVE);
    let power = 10_f64.powf(least_step.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
    let step = steps.into_iter().find(|step| *step >= least_step * 0.999).unwrap_or(10.0 * power);
    let count = (most / step).ceil().max(1.0) as u32;
    (0..=count).map(|number| f64::from(number) * step).collect()
}

/// Formats a whole number with a comma between groups of three digits.
fn grouped(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Escapes a title for XML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::super::file::TunedModel;
    use super::super::tests::{choices, points};
    use super::*;

    fn report(points: Vec<Point>, choices: Vec<TunedChoice>, busy_share: Option<f64>) -> Report {
        let hardware = Hardware {
            processor: "an abacus ".repeat(15).trim().to_owned(),
            cores: 3,
            instruction_set: "beads".to_owned(),
        };
        let (source, digest) = ("a <model> & a machine".to_owned(), "d1".to_owned());
        Report {
            tuned: TunedModel { source, digest, hardware, choices, busy_share },
            points,
            qualities: Vec::new(),
            gains: Vec::new(),
            file: None,
            plot: None,
            took: Duration::from_secs(1),
            others_share: Ok(busy_share.unwrap_or(0.01)),
        }
    }

    #[test]
    fn without_measurements_the_plot_is_empty() {
        assert!(svg(&report(Vec::new(), Vec::new(), None)).ends_with("</svg>\n"));
    }

    #[test]
    fn the_svg_has_a_circle_and_a_bar_for_each_point_and_is_well_formed() {
        let svg = svg(&report(points(), choices(), None));
        assert_eq!((svg.matches("<circle").count(), svg.matches("class=\"spread\"").count()), (4, 4));
        assert_eq!(svg.matches("r=\"7\"").count(), 1, "one is chosen");
        assert!(svg.contains("a &lt;model&gt; &amp; a machine"));
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
        for number in svg.split('"').filter_map(|part| part.parse::<f64>().ok()) {
            assert!((-90.0..=WIDTH).contains(&number), "{number} lies outside");
        }
        assert!(svg.contains("f32, 1 thread: 1,024 tokens chosen"), "{svg}");
        assert!(!svg.contains("other processes"), "{svg}");
    }

    #[test]
    fn the_whole_title_is_shown_and_a_busy_machine_is_named() {
        let svg = svg(&report(points(), choices(), Some(0.34)));
        let texts: Vec<&str> = svg
            .lines()
            .filter_map(|line| line.strip_prefix("<text")?.split_once('>')?.1.strip_suffix("</text>"))
            .collect();
        assert_eq!(texts.iter().map(|text| text.matches("abacus").count()).sum::<usize>(), 15, "{texts:?}");
        assert!(texts.iter().all(|text| text.chars().count() <= LINE_CHARACTERS), "{texts:?}");
        assert!(svg.contains("other processes used 34 % of the CPU time"), "{svg}");
    }

    #[test]
    fn the_choice_is_explained() {
        let explained = |target_met| {
            let choice = TunedChoice { target_met, ..choices().remove(0) };
            explanation(&choice, &points().iter().collect::<Vec<_>>())
        };
        assert!(explained(None).contains("smallest budget with at least 97 %"), "{}", explained(None));
        assert!(explained(Some(true)).contains("meet the latency target"));
        assert!(explained(Some(false)).contains("comes closest"));
    }

    #[test]
    fn ticks_are_round_numbers_that_span_the_range() {
        assert_eq!(time_ticks(1.6, 42.0), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0]);
        assert_eq!(time_ticks(0.21, 0.4), [0.2, 0.5]);
        assert_eq!(time_ticks(10.0, 10.0), [10.0, 20.0]);
        assert_eq!(time_ticks(0.03, 0.05), [0.02, 0.05]);
        assert_eq!(speed_ticks(9700.0), [0.0, 2000.0, 4000.0, 6000.0, 8000.0, 10_000.0]);
        assert_eq!(speed_ticks(10_000.0), [0.0, 2000.0, 4000.0, 6000.0, 8000.0, 10_000.0]);
        assert_eq!(speed_ticks(1.0), [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]);
        assert_eq!(
            (grouped(0.0), grouped(999.4), grouped(1234567.0)),
            ("0".into(), "999".into(), "1,234,567".into())
        );
    }
}
