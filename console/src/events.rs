//! Events that the console lists: failovers and spillover, changes of health, drains, and switches of models.

use std::collections::VecDeque;

use serde::Serialize;

/// Maximum number of events: those of some hours, and a page that a browser renders at once.
pub const EVENTS_MAX: usize = 200;
/// Time after which the same event is a new one, in milliseconds.
const COALESCED_MS: u64 = 5_000;

/// Kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// Attempts went to another region after a failure.
    Failover,
    /// Attempts went to another region because the preferred one was overloaded.
    Spillover,
    /// The health of a region changed.
    Health,
    /// A drain of a region began or ended.
    Drain,
    /// A gateway appeared or is lost.
    Gateway,
    /// A deployment is served with another model revision.
    Rollout,
}

/// Event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ConsoleEvent {
    /// Number of the event; later ones have higher ones.
    pub number: u64,
    /// Begin in milliseconds since 1970.
    pub at_ms: u64,
    /// Last occurrence.
    pub last_ms: u64,
    /// Kind.
    pub kind: EventKind,
    /// Region, gateway or deployment that it is about; the region that was left.
    pub subject: String,
    /// Region that was used instead, or new state.
    pub to: String,
    /// Cause.
    pub cause: String,
    /// Number of requests.
    pub requests: u64,
    /// Identifier of one of the requests.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub example: String,
}

/// The last events, in the order of their last occurrence.
#[derive(Clone, Debug, Default)]
pub struct Events {
    all: VecDeque<ConsoleEvent>,
    recorded: u64,
}

impl Events {
    /// Records an event of `requests` requests; returns whether it is a new one. An equal one that occurred within
    /// [`COALESCED_MS`] is continued, if it is of requests or of gateways: each start of a gateway is an event, and a region
    /// that restarts many must not replace all others.
    pub fn record(
        &mut self,
        kind: EventKind,
        (subject, to, cause): (&str, &str, &str),
        (requests, example): (u64, &str),
        now_ms: u64,
    ) -> bool {
        let is_same = |event: &ConsoleEvent| {
            event.kind == kind
                && (event.subject.as_str(), event.to.as_str(), event.cause.as_str()) == (subject, to, cause)
        };
        let is_continued = |event: &ConsoleEvent| event.requests > 0 || kind == EventKind::Gateway;
        let mut recent = self
            .all
            .iter()
            .enumerate()
            .rev()
            .take_while(|(_, event)| event.last_ms.saturating_add(COALESCED_MS) > now_ms);
        let same = recent.find(|(_, event)| is_same(event)).filter(|(_, event)| is_continued(event));
        if let Some(mut event) = same.map(|(at, _)| at).and_then(|at| self.all.remove(at)) {
            event.requests = event.requests.saturating_add(requests);
            event.last_ms = now_ms;
            if event.example.is_empty() {
                event.example = example.to_owned();
            }
            self.all.push_back(event);
            return false;
        }
        self.recorded += 1;
        if self.all.len() >= EVENTS_MAX {
            self.all.pop_front();
        }
        self.all.push_back(ConsoleEvent {
            number: self.recorded,
            at_ms: now_ms,
            last_ms: now_ms,
            kind,
            subject: subject.to_owned(),
            to: to.to_owned(),
            cause: cause.to_owned(),
            requests,
            example: example.to_owned(),
        });
        true
    }

    /// Returns the events, the one that occurred last first.
    pub fn latest(&self) -> impl Iterator<Item = &ConsoleEvent> {
        self.all.iter().rev()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failover(events: &mut Events, to: &str, now_ms: u64) {
        events.record(EventKind::Failover, ("a/1", to, "evacuation"), (2, "r"), now_ms);
    }

    #[test]
    fn the_same_failover_is_one_event_until_it_pauses() {
        let mut events = Events::default();
        failover(&mut events, "b/1", 1_000);
        failover(&mut events, "c/1", 1_500);
        failover(&mut events, "b/1", 1_000 + COALESCED_MS - 1);
        failover(&mut events, "b/1", 1_000 + 2 * COALESCED_MS);
        let found: Vec<_> =
            events.latest().map(|event| (event.number, event.to.as_str(), event.requests)).collect();
        assert_eq!(found, [(3, "b/1", 2), (1, "b/1", 4), (2, "c/1", 2)]);
    }

    #[test]
    fn an_event_that_continues_is_the_latest_and_is_found_behind_older_ones() {
        let mut events = Events::default();
        for (to, at) in [("b/1", 1_000), ("c/1", 1_001), ("b/1", 5_000), ("b/1", 9_000)] {
            failover(&mut events, to, at);
        }
        let found: Vec<_> = events.latest().map(|event| (event.to.as_str(), event.requests)).collect();
        assert_eq!(found, [("b/1", 6), ("c/1", 2)]);
    }

    #[test]
    fn an_event_has_the_first_example_that_there_is() {
        let mut events = Events::default();
        for example in ["", "r-1", "r-2"] {
            events.record(EventKind::Failover, ("a/1", "b/1", "retry"), (1, example), 1_000);
        }
        assert_eq!(events.latest().next().map(|event| event.example.as_str()), Some("r-1"));
    }

    #[test]
    fn counts_of_requests_do_not_overflow() {
        let mut events = Events::default();
        let mut record =
            |requests| events.record(EventKind::Failover, ("a/1", "b/1", "retry"), (requests, ""), 1_000);
        assert!(record(u64::MAX) && !record(u64::MAX));
        assert_eq!(events.latest().next().map(|event| event.requests), Some(u64::MAX));
    }

    #[test]
    fn gateways_that_restart_at_the_same_time_are_one_event() {
        let mut events = Events::default();
        let mut record = |at| events.record(EventKind::Gateway, ("a/1", "reporting", ""), (0, ""), at);
        assert_eq!([record(1_000), record(1_001), record(1_001 + COALESCED_MS)], [true, false, true]);
    }

    #[test]
    fn changes_without_requests_are_separate_events() {
        let mut events = Events::default();
        for at in [1_000, 1_200] {
            events.record(EventKind::Health, ("a/1", "down", ""), (0, ""), at);
        }
        assert_eq!(events.latest().count(), 2);
    }

    #[test]
    fn limit_of_events_is_enforced() {
        let mut events = Events::default();
        for number in 0..=EVENTS_MAX as u64 {
            failover(&mut events, "b/1", number * 2 * COALESCED_MS);
        }
        let numbers: Vec<_> = events.latest().map(|event| event.number).collect();
        assert_eq!(
            (numbers.len(), numbers[0], numbers[EVENTS_MAX - 1]),
            (EVENTS_MAX, EVENTS_MAX as u64 + 1, 2)
        );
    }
}
