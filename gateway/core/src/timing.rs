//! `server-timing`: latency of a request by component (W3C Server Timing, <https://www.w3.org/TR/server-timing/>).
//!
//! Each process adds its own durations. The replica reports `queue`, `tokenize` and `engine`; the region's ingress adds
//! `region`, all of its own time; the gateway subtracts that from the time that it waited and reports the rest as
//! `network`. The remainder of the total is the gateway's own.

use crate::decimal;
use std::time::Duration;

/// Durations reported by the region, read from its response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionTiming {
    /// Time from request head to response head at the region's ingress.
    pub region: Option<Duration>,
    /// Waiting for a batch.
    pub queue: Option<Duration>,
    /// Tokenization.
    pub tokenize: Option<Duration>,
    /// Computation of the model.
    pub engine: Option<Duration>,
}

impl RegionTiming {
    /// Parses a header value; invalid parts are ignored.
    pub fn parse(header: &str) -> RegionTiming {
        let mut timing = RegionTiming::default();
        for metric in header.split(',') {
            let Some((name, parameters)) = metric.split_once(';') else { continue };
            let durations = parameters.split(';').map(str::trim);
            let duration =
                durations.filter_map(|part| part.strip_prefix("dur=")).next().and_then(milliseconds);
            match name.trim() {
                "region" => timing.region = duration,
                "queue" => timing.queue = duration,
                "tokenize" => timing.tokenize = duration,
                "engine" => timing.engine = duration,
                _ => {}
            }
        }
        timing
    }

    /// Returns the gateway's header: of `total`, the last attempt waited `waited` for its first byte.
    pub fn gateway_header(&self, total: Duration, waited: Duration) -> String {
        let mut header = String::with_capacity(112);
        push(&mut header, "gateway", Some(total.saturating_sub(waited)));
        push(&mut header, "network", self.region.map(|region| waited.saturating_sub(region)));
        push(&mut header, "queue", self.queue);
        push(&mut header, "tokenize", self.tokenize);
        push(&mut header, "engine", self.engine);
        header
    }
}

/// Returns the region's header: the replica's own metrics, and the ingress's time.
pub fn region_header(replica: Option<&str>, region: Duration) -> String {
    let mut header = String::with_capacity(96);
    if let Some(replica) = replica {
        header.push_str(replica);
    }
    push(&mut header, "region", Some(region));
    header
}

fn push(header: &mut String, name: &str, duration: Option<Duration>) {
    let Some(duration) = duration else { return };
    let separator = if header.is_empty() { "" } else { ", " };
    for part in [separator, name, ";dur="] {
        header.push_str(part);
    }
    decimal::push_millis(header, duration);
}

fn milliseconds(text: &str) -> Option<Duration> {
    if let Some(duration) = decimal::millis(text) {
        return Some(duration);
    }
    Duration::try_from_secs_f64(text.parse::<f64>().ok()? / 1e3).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_gateway_separates_the_network_from_the_region() {
        let replica = "queue;dur=1.000, tokenize;dur=2.000, engine;dur=3.000";
        let region = region_header(Some(replica), 7 * MS);
        assert_eq!(region, format!("{replica}, region;dur=7.000"));
        assert_eq!(
            RegionTiming::parse(&region).gateway_header(100 * MS, 95 * MS),
            "gateway;dur=5.000, network;dur=88.000, queue;dur=1.000, tokenize;dur=2.000, engine;dur=3.000"
        );
    }

    #[test]
    fn an_invalid_header_is_ignored() {
        for header in
            ["", "region", "region;dur=x", "region;dur=-1", "region;dur=inf", "other;dur=1", ";;,,=;"]
        {
            assert_eq!(RegionTiming::parse(header), RegionTiming::default(), "{header}");
        }
        assert_eq!(region_header(None, 2 * MS), "region;dur=2.000");
    }
}
