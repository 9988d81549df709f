//! Many requests on one connection: which connection takes the next of them, and whether a connection is alive.
//!
//! Over HTTP/1.1 a connection carries one request, and a connection that stalls stalls one. Over HTTP/2 it carries many, which
//! saves connections and shares what goes wrong: a lost packet, or a path that swallows everything, holds up all that are on
//! it. So requests are spread over several connections once there are more than a few ([`pick`]), and a connection from which
//! nothing is heard gets nothing more to do long before it is given up ([`Pulse`]). What is under way on it stays: whoever
//! waits for an answer leaves by itself, as its plan has it, and a connection that was only late goes on.

use std::time::{Duration, Instant};

/// Connections to one address. With [`REQUESTS_EASY`] on each that is 512 requests; beyond, they share.
pub const CONNECTIONS_MAX: usize = 16;
/// As long as one of the connections has fewer requests than this, no other is opened. What an answer may have under way
/// (its window) times this is what a connection may have, so that so many clients who do not read hold up nobody else.
pub const REQUESTS_EASY: usize = 32;
/// Requests on one connection. Times [`CONNECTIONS_MAX`] it is more than an edge asks of a region at once (8,192), so that
/// what is reached first is the bound that clients are told of, and a report still finds a place.
pub const REQUESTS_MAX: usize = 640;
/// How often a connection's pulse is felt.
pub const BEAT: Duration = Duration::from_millis(250);
/// From when on a question without an answer makes a connection silent: longer than a round trip around the globe.
pub const SILENT_AFTER: Duration = Duration::from_millis(500);
/// From when on it is dead: as long as a region's silence takes to mean the same.
pub const DEAD_AFTER: Duration = Duration::from_secs(3);

/// What is asked of a connection before it is given another request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Requests under way on it.
    pub requests: usize,
    /// Nothing is heard from it.
    pub silent: bool,
}

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pick {
    /// It goes on this one.
    Use(usize),
    /// It goes on this one, and another is opened for those who come next.
    UseAndOpen(usize),
    /// It waits for the one that is opened for it.
    Open,
    /// It waits for the one that is being opened.
    Wait,
    /// There is nothing to wait for.
    Full,
}

/// Which of the connections takes a request. The first that has it easy, so that those which a quiet hour has made
/// superfluous grow idle; then the one with the least to do.
pub fn pick(connections: impl Iterator<Item = Load> + Clone, opening: bool) -> Pick {
    let sound = connections.clone().enumerate().filter(|(_, load)| !load.silent);
    if let Some((at, _)) = sound.clone().find(|(_, load)| load.requests < REQUESTS_EASY) {
        return Pick::Use(at);
    }
    let least = sound.filter(|(_, load)| load.requests < REQUESTS_MAX).min_by_key(|(_, load)| load.requests);
    let may_open = !opening && connections.count() < CONNECTIONS_MAX;
    match (least, may_open) {
        (Some((at, _)), true) => Pick::UseAndOpen(at),
        (Some((at, _)), false) => Pick::Use(at),
        (None, true) => Pick::Open,
        (None, false) if opening => Pick::Wait,
        (None, false) => Pick::Full,
    }
}

/// What is to be done about a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beat {
    /// Nothing.
    Rest,
    /// It should be asked whether it is there.
    Ask,
    /// It is not.
    Dead,
}

/// Whether anything is heard from a connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pulse {
    /// When it was asked, and has said nothing since.
    asked: Option<Instant>,
}

impl Pulse {
    /// To be called every [`BEAT`]: the last byte was `heard` then, and so many `requests` are under way. It is asked only
    /// while somebody waits: nobody minds the death of a connection that nobody uses.
    pub fn felt(&mut self, heard: Instant, requests: usize, now: Instant) -> Beat {
        if self.asked.is_some_and(|asked| heard >= asked) {
            self.asked = None;
        }
        match self.asked {
            Some(asked) if now.saturating_duration_since(asked) >= DEAD_AFTER => Beat::Dead,
            Some(_) => Beat::Rest,
            None if requests > 0 && now.saturating_duration_since(heard) >= BEAT => {
                self.asked = Some(now);
                Beat::Ask
            }
            None => Beat::Rest,
        }
    }

    /// Whether it owes an answer for so long that nothing more should be given to it.
    pub fn is_silent(&self, now: Instant) -> bool {
        self.asked.is_some_and(|asked| now.saturating_duration_since(asked) >= SILENT_AFTER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loads(requests: &[usize]) -> Vec<Load> {
        requests.iter().map(|requests| Load { requests: *requests, silent: false }).collect()
    }

    fn check(connections: &[Load], opening: bool, expected: Pick) {
        assert_eq!(pick(connections.iter().copied(), opening), expected, "{connections:?}, {opening}");
    }

    #[test]
    fn the_first_that_has_it_easy_takes_a_request_and_another_is_opened_when_none_has() {
        const FULL: usize = REQUESTS_EASY;
        check(&[], false, Pick::Open);
        check(&[], true, Pick::Wait);
        check(&loads(&[FULL - 1, 0]), false, Pick::Use(0));
        check(&loads(&[FULL, 1]), false, Pick::Use(1));
        check(&loads(&[FULL + 1, FULL]), false, Pick::UseAndOpen(1));
        check(&loads(&[FULL + 1, FULL]), true, Pick::Use(1));
    }

    #[test]
    fn there_are_as_many_connections_and_requests_as_may_be_and_not_one_more() {
        let many = |count: usize, requests| loads(&vec![requests; count]);
        check(&many(CONNECTIONS_MAX - 1, REQUESTS_MAX), false, Pick::Open);
        check(&many(CONNECTIONS_MAX, REQUESTS_MAX - 1), false, Pick::Use(0));
        check(&many(CONNECTIONS_MAX, REQUESTS_MAX), false, Pick::Full);
        check(&many(CONNECTIONS_MAX - 1, REQUESTS_MAX), true, Pick::Wait);
    }

    #[test]
    fn one_that_is_silent_gets_nothing_more_and_counts() {
        let mut connections = loads(&[0, REQUESTS_EASY]);
        connections[0].silent = true;
        check(&connections, false, Pick::UseAndOpen(1));
        connections.truncate(1);
        check(&connections, false, Pick::Open);
        check(&connections, true, Pick::Wait);
        check(&vec![Load { requests: 1, silent: true }; CONNECTIONS_MAX], false, Pick::Full);
    }

    /// Feels a pulse every beat while a request is under way; the last byte was heard at each of `heard`, in beats. What was
    /// done at each, as a word.
    fn felt(beats: u32, heard: &[u32]) -> String {
        let (begin, mut pulse) = (crate::some_instant(), Pulse::default());
        let words = (1..=beats).map(|beat| {
            let now = begin + beat * BEAT;
            let last = heard.iter().filter(|heard| **heard <= beat).max().copied().unwrap_or(0);
            match pulse.felt(begin + last * BEAT, 1, now) {
                Beat::Rest if pulse.is_silent(now) => 's',
                Beat::Rest => '.',
                Beat::Ask => '?',
                Beat::Dead => 'x',
            }
        });
        words.collect()
    }

    #[test]
    fn a_connection_that_says_nothing_is_asked_then_silent_then_dead() {
        assert_eq!(felt(13, &[]), "?.ssssssssssx");
        // What it says without being asked is as good.
        assert_eq!(felt(6, &[1, 2, 4]), "..?.?.");
        // Late, and alive again.
        assert_eq!(felt(6, &[4]), "?.s.?.");
    }

    #[test]
    fn one_on_which_nobody_waits_is_left_in_peace() {
        let (begin, mut pulse) = (crate::some_instant(), Pulse::default());
        for beat in 1..100 {
            assert_eq!(pulse.felt(begin, 0, begin + beat * BEAT), Beat::Rest);
        }
    }
}
