//! Report as HdrHistogram files, for other tools.
//!
//! `.hgrm` is the percentile distribution of HdrHistogram's `outputPercentileDistribution`, as wrk2 prints it and
//! HdrHistogram's plotter reads it. A histogram log contains a compressed histogram for each second, task and region,
//! tagged with task and region; HdrHistogram's `HistogramLogProcessor` and HistogramLogAnalyzer read it. Values are
//! milliseconds in the first format, as the plotter labels them, and microseconds in the second, with the scale to
//! milliseconds.

use std::fmt::Write as _;
use std::io;
use std::time::{Duration, SystemTime};

use hdrhistogram::Histogram;
use hdrhistogram::serialization::V2DeflateSerializer;
use hdrhistogram::serialization::interval_log::{IntervalLogWriterBuilder, Tag};

use super::Report;

/// Lines for each halving of the distance to 100 %, as in wrk2 and the library.
const TICKS_PER_HALF: u32 = 5;

/// Divisor for the maximum that the log shows in clear text: microseconds to milliseconds.
const MICROS_PER_MILLI: f64 = 1000.0;

impl Report {
    /// Formats the latency distribution of all ok requests by percentile.
    pub fn to_hgrm(&self) -> String {
        let latencies = self.record.total().latencies();
        let histogram = latencies.histogram();
        let milliseconds = |micros: f64| micros / MICROS_PER_MILLI;
        let mut text = format!(
            "{:>12} {:>14} {:>10} {:>14}\n\n",
            "Value", "Percentile", "TotalCount", "1/(1-Percentile)"
        );
        let mut line = |value: f64, quantile: f64, count: u64| {
            // The value for 100 % is infinite; plotters omit it.
            let inverse =
                if quantile < 1.0 { format!("{:>14.2}", 1.0 / (1.0 - quantile)) } else { String::new() };
            writeln!(text, "{value:>12.3} {quantile:>2.12} {count:>10} {inverse}")
                .expect("text takes every line");
        };
        let mut count = 0;
        for point in histogram.iter_quantiles(TICKS_PER_HALF) {
            count += point.count_since_last_iteration();
            line(milliseconds(point.value_iterated_to() as f64), point.quantile_iterated_to(), count);
        }
        let [mean, deviation, max] =
            [histogram.mean(), histogram.stdev(), histogram.max() as f64].map(milliseconds);
        let _ = writeln!(text, "#[Mean    = {mean:>12.3}, StdDeviation   = {deviation:>12.3}]");
        let _ = writeln!(text, "#[Max     = {max:>12.3}, Total count    = {:>12}]", histogram.len());
        let _ = writeln!(text, "#[Buckets = {:>12}, SubBuckets     = {:>12}]", histogram.buckets(), 2048);
        text
    }

    /// Formats a log with a histogram for each second, task and region of a run that began at `began`.
    pub fn to_hdr_log(&self, began: SystemTime) -> io::Result<Vec<u8>> {
        let (mut log, mut serializer) = (Vec::new(), V2DeflateSerializer::new());
        let mut builder = IntervalLogWriterBuilder::new();
        builder
            .add_comment("meridian load: microseconds from the intended start; tags are task@region")
            .with_start_time(began)
            .with_base_time(began)
            .with_max_value_divisor(MICROS_PER_MILLI);
        let mut writer = builder.begin_log_with(&mut log, &mut serializer)?;
        for (task, record) in self.options.tasks.iter().zip(self.record.tasks()) {
            for (second, regions) in record.seconds() {
                for (served, second_record) in regions {
                    let mut histogram: Histogram<u64> = Histogram::new(3).map_err(io::Error::other)?;
                    for (micros, count) in second_record.latencies.counts() {
                        histogram.record_n(micros.into(), count.into()).map_err(io::Error::other)?;
                    }
                    let tag = format!("{}@{served}", task.name).replace([' ', ','], "-");
                    let tag = Tag::new(&tag);
                    let written = writer.write_histogram(
                        &histogram,
                        Duration::from_secs(*second),
                        Duration::from_secs(1),
                        tag,
                    );
                    written.map_err(|error| io::Error::other(format!("{error:?}")))?;
                }
            }
        }
        Ok(log)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::report;
    use super::*;
    use hdrhistogram::serialization::Deserializer;
    use hdrhistogram::serialization::interval_log::{IntervalLogIterator, LogEntry};

    #[test]
    fn the_distribution_is_that_of_the_report() {
        let text = report().to_hgrm();
        let lines: Vec<Vec<f64>> = text
            .lines()
            .skip(2)
            .filter(|line| !line.starts_with('#'))
            .map(|line| line.split_whitespace().map(|cell| cell.parse().unwrap()).collect())
            .collect();
        assert_eq!(lines[0][..2], [8.003, 0.0], "{text}");
        let last = lines.last().unwrap();
        assert!((last[0], last[1], last[2], last.len()) == (90.047, 1.0, 200.0, 3), "{text}");
        assert!(lines.is_sorted_by(|a, b| a[0] <= b[0] && a[1] <= b[1] && a[2] <= b[2]), "{text}");
        assert!(text.contains("Total count    =          200]"), "{text}");
    }

    #[test]
    fn the_log_is_read_back_second_by_second() {
        let log = report().to_hdr_log(SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000)).unwrap();
        let mut read = Vec::new();
        for entry in IntervalLogIterator::new(&log) {
            if let LogEntry::Interval(interval) = entry.unwrap() {
                let bytes = base64_of(interval.encoded_histogram());
                let histogram: Histogram<u64> = Deserializer::new().deserialize(&mut &bytes[..]).unwrap();
                let tag = interval.tag().unwrap().as_str().to_owned();
                read.push((interval.start_timestamp().as_secs(), tag, histogram.len(), histogram.max()));
            }
        }
        let expected = [
            (0, "queries@gcp/europe-west4", 100, 8031),
            (1, "queries@aws/us-east-1", 100, 90_111),
            (1, "queries@(no-region)", 0, 0),
        ]
        .map(|(second, tag, count, max)| (second, tag.to_owned(), count, max));
        assert_eq!(read.len(), expected.len(), "{}", String::from_utf8_lossy(&log));
        for (second, tag, count, max) in expected {
            let close = |got: u64| got.abs_diff(max) * 1000 <= max;
            let found = read.iter().any(|r| (r.0, &r.1, r.2) == (second, &tag, count) && close(r.3));
            assert!(found, "{second} {tag} in {read:?}");
        }
    }

    /// Decodes base64: four letters are three bytes.
    fn base64_of(text: &str) -> Vec<u8> {
        const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut bytes = Vec::new();
        for four in text.as_bytes().chunks(4) {
            let digits = four.iter().filter_map(|letter| LETTERS.iter().position(|known| known == letter));
            let digits: Vec<u32> = digits.map(|digit| digit as u32).collect();
            let word = digits.iter().fold(0_u32, |word, digit| word << 6 | digit) << (6 * (4 - digits.len()));
            bytes.extend_from_slice(&word.to_be_bytes()[1..digits.len()]);
        }
        bytes
    }
}
