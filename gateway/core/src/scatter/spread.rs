//! How large a piece is, where the next one goes, and how many are under way at once.
//!
//! A piece is worth a round trip when computing it takes longer than asking for it: [`scale`]. Beyond that pieces
//! had better be small, for what is slowest at the end, and what a lost region takes along, is one piece. So each replica
//! gets a handful of them.
//!
//! They are not dealt out at the beginning but given to whoever has room, in the order of the inputs: [`Spread`] sends
//! the next piece to the region that would *finish it first* (its round trip, what waits there, what of ours is there
//! already, and the piece, at its speed), and never more to a region than keeps its replicas busy while an answer
//! travels. A region that turns out slower than it said finishes less often and so is given less; one that is far away is
//! used as soon as waiting for the near one would take longer; one that is lost is not asked again. Dealing by the
//! reported speeds would be the obvious other way, and the whole would then wait for whoever had reported wrongly.
//!
//! This is no way around what protects a region from others: a piece waits in the bulk priority there, and a request has few
//! pieces under way in a region, whatever it has left. A region that turns a piece away gets none until it has said that
//! there is room again: the piece goes to another meanwhile, or waits.

use super::REPLICA_INPUTS_MAX;
use super::cut::{PIECE_INPUTS_MAX, PIECE_TOKENS_MAX};
use regions::health::Health;
use regions::set::RegionIndex;
use std::time::{Duration, Instant};

/// A request of fewer inputs, and of fewer tokens than [`CUT_TOKENS_MIN`], is never looked at: it is what lookups and
/// rerankers send (`replica_core::priority`: at most some 100), and would be over before a cut had paid for itself.
pub const CUT_INPUTS_MIN: u64 = 256;
/// As [`CUT_INPUTS_MIN`], for few inputs that are long: two pieces that are worth it.
pub const CUT_TOKENS_MIN: u64 = 2 * PIECE_TOKENS_MIN;
/// Tokens below which no piece is worth its overhead of a millisecond or so on each side, whatever the distance: half a
/// second of MiniLM on two cores.
pub const PIECE_TOKENS_MIN: u64 = 2048;
/// A piece takes at least so many round trips to compute: then a replica that is given the next one while it computes
/// never waits for the network.
const PIECE_ROUND_TRIPS: u32 = 2;
/// Pieces for each replica: the last to end has a quarter of a share at most, and so has what a lost region takes along.
const PIECES_PER_REPLICA: u64 = 4;
/// Pieces under way for each replica: one that is computed, and one that is there when it is done.
const UNDER_WAY_PER_REPLICA: u32 = 2;
/// Pieces under way for one request, over all regions.
pub const UNDER_WAY_MAX: u32 = 32;
/// Tokens a second of a replica, where nobody knows any better: MiniLM on two cores (`replica_core::limits`).
const SPEED_DEFAULT: u64 = 4_000;

/// A region that could take pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which.
    pub region: RegionIndex,
    /// From here to there and back.
    pub rtt: Duration,
    /// Replicas of the deployment that take work; at least one.
    pub replicas: u32,
    /// Tokens that wait there or are being computed.
    pub pending_tokens: u64,
    /// What its replicas compute together; 0 until it is known.
    pub tokens_per_second: u64,
}

/// How a request is spread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scale {
    /// How many tokens a piece should have.
    pub piece_tokens: u64,
    /// Who takes part, in the order in which a whole request would try them.
    pub places: Vec<Place>,
}

/// How a request of so many inputs and tokens is spread over `places`, which are in the order in which a whole one would
/// try them; `None` if it had better stay whole. Whoever is too far away for pieces of this request does not take part.
pub fn scale(inputs: u64, tokens: u64, places: &[Place]) -> Option<Scale> {
    let mut places = places.to_vec();
    while let Some(farthest) = places.iter().map(|place| place.rtt).max() {
        let replicas: u64 = places.iter().map(|place| u64::from(place.replicas)).sum();
        let worth = worth(farthest, &places);
        if inputs >= 2 && replicas >= 2 && tokens >= 2 * worth || must_be_cut(inputs, tokens) {
            let share = tokens / (replicas.max(1) * PIECES_PER_REPLICA);
            return Some(Scale { piece_tokens: share.max(worth).min(PIECE_TOKENS_MAX), places });
        }
        places.retain(|place| place.rtt < farthest);
    }
    None
}

/// Whether a request is cut whatever a piece costs: no replica takes so many inputs, or can be expected to take so many
/// tokens.
pub fn must_be_cut(inputs: u64, tokens: u64) -> bool {
    inputs > REPLICA_INPUTS_MAX as u64 || tokens > 2 * PIECE_TOKENS_MAX
}

/// Tokens that are worth a round trip to the farthest place.
fn worth(farthest: Duration, places: &[Place]) -> u64 {
    let fastest = places.iter().map(|place| speed(place, places) / u64::from(place.replicas.max(1))).max();
    let while_asking = farthest * PIECE_ROUND_TRIPS;
    let tokens = u128::from(fastest.unwrap_or(SPEED_DEFAULT)) * while_asking.as_micros() / 1_000_000;
    u64::try_from(tokens).unwrap_or(u64::MAX).clamp(PIECE_TOKENS_MIN, PIECE_TOKENS_MAX)
}

/// What a place computes. One of which it is not known is taken for as fast as the fastest, a replica for a replica:
/// given work, it will be known.
fn speed(place: &Place, places: &[Place]) -> u64 {
    if place.tokens_per_second > 0 {
        return place.tokens_per_second;
    }
    let of_a_replica = |place: &Place| place.tokens_per_second / u64::from(place.replicas.max(1));
    let fastest = places.iter().map(of_a_replica).filter(|speed| *speed > 0).max();
    fastest.unwrap_or(SPEED_DEFAULT).saturating_mul(u64::from(place.replicas.max(1)))
}

/// Where the pieces of one request are.
#[derive(Clone, Debug)]
pub struct Spread {
    seats: Vec<Seat>,
}

#[derive(Clone, Debug)]
struct Seat {
    place: Place,
    tokens_per_second: u64,
    /// Pieces of ours that are under way there, and their tokens.
    pieces: u32,
    tokens: u64,
    /// It has turned a piece away and takes none until then.
    closed_until: Option<Instant>,
}

/// How good a place is for the next piece; less is better. **The order of the fields is the policy.**
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Score {
    finish: Duration,
    /// Among the equally quick the first of the order that a whole request would have.
    order: usize,
}

/// Whether a place is used. **The order of the variants is the preference.**
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Standing {
    Usable,
    Doubtful,
    Lost,
}

impl Standing {
    fn of(health: Health) -> Standing {
        match health {
            Health::Healthy | Health::Unknown => Standing::Usable,
            Health::Suspect => Standing::Doubtful,
            Health::Down => Standing::Lost,
        }
    }
}

impl Spread {
    /// Over these places, in the order in which a whole request would try them.
    pub fn new(places: &[Place]) -> Spread {
        let seat = |place: &Place| Seat {
            place: *place,
            tokens_per_second: speed(place, places),
            pieces: 0,
            tokens: 0,
            closed_until: None,
        };
        Spread { seats: places.iter().map(seat).collect() }
    }

    /// The region that the next piece, of so many tokens, is sent to; `None` while all have enough. Counts as under way
    /// there until it has [`Spread::ended`]. `health` is what is known of a region now: a piece had better wait for a
    /// healthy one than go to a suspect, and one that is down is asked only if all are; then the piece's own plan finds
    /// the words for it.
    pub fn next(
        &mut self,
        tokens: u64,
        health: impl Fn(RegionIndex) -> Health,
        now: Instant,
    ) -> Option<RegionIndex> {
        if self.under_way() >= UNDER_WAY_MAX {
            return None;
        }
        let best = self.seats.iter().map(|seat| Standing::of(health(seat.place.region))).min()?;
        let scores = self.seats.iter().enumerate().filter_map(|(order, seat)| {
            let usable = Standing::of(health(seat.place.region)) == best;
            (usable && seat.is_open(now) && seat.pieces < seat.pieces_max())
                .then(|| Score { finish: seat.finish(tokens), order })
        });
        let Score { order, .. } = scores.min()?;
        let seat = &mut self.seats[order];
        seat.pieces += 1;
        seat.tokens = seat.tokens.saturating_add(tokens);
        Some(seat.place.region)
    }

    /// A piece that was sent to `region` is over, however it ended and whoever answered it.
    pub fn ended(&mut self, region: RegionIndex, tokens: u64) {
        let seat = self.seats.iter_mut().find(|seat| seat.place.region == region && seat.pieces > 0);
        let seat = seat.expect("a piece ends once, where it was sent");
        seat.pieces -= 1;
        seat.tokens = seat.tokens.saturating_sub(tokens);
    }

    /// `region` has turned a piece away: it gets no other before `until`.
    pub fn close(&mut self, region: RegionIndex, until: Instant) {
        // One that was asked instead of another need not be among the places.
        if let Some(seat) = self.seats.iter_mut().find(|seat| seat.place.region == region) {
            seat.closed_until = seat.closed_until.max(Some(until));
        }
    }

    /// When the next of those who have turned a piece away takes one again; `None` if nobody has.
    pub fn opens(&self, now: Instant) -> Option<Instant> {
        self.seats.iter().filter(|seat| !seat.is_open(now)).filter_map(|seat| seat.closed_until).min()
    }

    /// Who takes pieces now or will before `deadline`.
    pub fn open_before(&self, deadline: Instant) -> impl Iterator<Item = RegionIndex> {
        self.seats.iter().filter(move |seat| seat.is_open(deadline)).map(|seat| seat.place.region)
    }

    /// Pieces under way.
    pub fn under_way(&self) -> u32 {
        self.seats.iter().map(|seat| seat.pieces).sum()
    }
}

impl Seat {
    fn is_open(&self, now: Instant) -> bool {
        self.closed_until.is_none_or(|until| until <= now)
    }

    fn pieces_max(&self) -> u32 {
        self.place.replicas.max(1).saturating_mul(UNDER_WAY_PER_REPLICA)
    }

    /// When a piece of so many tokens would be back.
    fn finish(&self, tokens: u64) -> Duration {
        let before = self.place.pending_tokens.saturating_add(self.tokens).saturating_add(tokens);
        let micros = u128::from(before) * 1_000_000 / u128::from(self.tokens_per_second.max(1));
        self.place.rtt.saturating_add(Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX)))
    }
}

/// One piece above which nothing is cut smaller than its inputs allow.
const _: () = assert!(PIECE_INPUTS_MAX <= REPLICA_INPUTS_MAX);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;
    use Health::*;
    use proptest::prelude::*;

    fn place(
        region: usize,
        rtt_ms: u64,
        replicas: u32,
        pending_tokens: u64,
        tokens_per_second: u64,
    ) -> Place {
        let region = RegionIndex::new(region).unwrap();
        Place { region, rtt: Duration::from_millis(rtt_ms), replicas, pending_tokens, tokens_per_second }
    }

    /// Where the next pieces of so many tokens go, until all places have enough.
    fn dealt(places: &[Place], tokens: u64, health: impl Fn(usize) -> Health) -> Vec<usize> {
        let mut spread = Spread::new(places);
        std::iter::from_fn(|| spread.next(tokens, |region| health(region.as_usize()), some_instant()))
            .map(|region| region.as_usize())
            .collect()
    }

    #[test]
    fn what_is_not_worth_a_round_trip_stays_whole() {
        let check = |inputs: u64, tokens: u64, places: &[Place], expected: Option<u64>| {
            let scale = scale(inputs, tokens, places);
            assert_eq!(
                scale.as_ref().map(|scale| scale.piece_tokens),
                expected,
                "{inputs} {tokens} {places:?}"
            );
            assert!(scale.is_none_or(|scale| scale.places == places), "{inputs} {tokens} {places:?}");
        };
        let near = place(0, 2, 1, 0, 4_000);
        let far = place(1, 200, 1, 0, 4_000);
        check(1_000, 20_000, &[], None);
        check(1_000, 20_000, &[near], None);
        check(1_000, 20_000, &[near, far], Some(2_500));
        check(2, 2 * PIECE_TOKENS_MIN, &[near, far], Some(PIECE_TOKENS_MIN));
        check(2, 2 * PIECE_TOKENS_MIN - 1, &[near, far], None);
        check(1, 20_000, &[near, far], None);
        // Twenty-five times as fast, a piece has to be larger to be worth the same way.
        let fast = |far: Place| Place { tokens_per_second: 100_000, ..far };
        check(1_000, 70_000, &[fast(near), fast(far)], None);
        check(1_000, 80_000, &[fast(near), fast(far)], Some(40_000));
        // What no replica takes whole is cut even for one.
        check(REPLICA_INPUTS_MAX as u64, 6_000, &[near], None);
        check(REPLICA_INPUTS_MAX as u64 + 1, 6_000, &[near], Some(PIECE_TOKENS_MIN));
        check(2, 2 * PIECE_TOKENS_MAX, &[near], None);
        check(2, 2 * PIECE_TOKENS_MAX + 1, &[near], Some(65_536));
        check(100_000, u64::MAX, &[near], Some(PIECE_TOKENS_MAX));
    }

    #[test]
    fn whoever_is_too_far_away_for_pieces_of_this_request_does_not_take_part() {
        let check = |tokens: u64, places: &[Place], expected: Option<(u64, &[usize])>| {
            let scale = scale(1_000, tokens, places);
            let seen = scale.map(|Scale { piece_tokens, places }| {
                (piece_tokens, places.iter().map(|place| place.region.as_usize()).collect::<Vec<_>>())
            });
            assert_eq!(seen, expected.map(|(tokens, regions)| (tokens, regions.to_vec())), "{tokens}");
        };
        let places = [place(0, 2, 1, 0, 50_000), place(1, 250, 1, 0, 50_000), place(2, 20, 1, 0, 50_000)];
        check(50_000, &places, Some((25_000, &[0, 1, 2])));
        check(49_999, &places, Some((6_249, &[0, 2])));
        check(4_095, &places, None);
        // Two replicas in the nearest are enough, and one is not.
        let near = [place(0, 2, 2, 0, 100_000), place(1, 250, 1, 0, 50_000)];
        check(20_000, &near, Some((2_500, &[0])));
        check(20_000, &[place(0, 2, 1, 0, 50_000), near[1]], None);
    }

    #[test]
    fn pieces_go_to_whoever_finishes_first() {
        // A second of work each; the near one is used until waiting for it takes longer than the way to the far one.
        let near_and_far = [place(0, 2, 2, 0, 8_000), place(1, 200, 1, 0, 4_000)];
        assert_eq!(dealt(&near_and_far, 4_000, |_| Healthy), [0, 0, 1, 0, 0, 1]);
        let tenth = [place(0, 2, 2, 0, 80_000), place(1, 200, 1, 0, 40_000)];
        assert_eq!(dealt(&tenth, 4_000, |_| Healthy), [0, 0, 0, 0, 1, 1]);
        let busy = [place(0, 2, 1, 20_000, 4_000), place(1, 200, 1, 0, 4_000)];
        assert_eq!(dealt(&busy, 4_000, |_| Healthy), [1, 1, 0, 0]);
        // In proportion to what they compute.
        let unequal = [place(0, 2, 1, 0, 1_000), place(1, 2, 4, 0, 4_000)];
        assert_eq!(dealt(&unequal, 1_000, |_| Healthy), [1, 1, 1, 0, 1, 1, 1, 1, 0, 1]);
        // A speed that nobody knows is that of the others; where it is known of none, all are alike.
        let unknown = [place(0, 3, 1, 0, 0), place(1, 2, 1, 0, 50_000), place(2, 1, 1, 0, 0)];
        assert_eq!(dealt(&unknown, 4_000, |_| Healthy), [2, 1, 0, 2, 1, 0]);
    }

    #[test]
    fn whoever_is_unwell_is_asked_only_if_nobody_is_well() {
        let places = [place(0, 2, 1, 0, 0), place(1, 2, 1, 0, 0), place(2, 2, 1, 0, 0)];
        assert_eq!(dealt(&places, 4_000, |at| [Suspect, Healthy, Unknown][at]), [1, 2, 1, 2]);
        assert_eq!(dealt(&places, 4_000, |at| [Suspect, Down, Down][at]), [0, 0]);
        assert_eq!(dealt(&places, 4_000, |at| [Healthy, Down, Healthy][at]), [0, 2, 0, 2]);
        assert_eq!(dealt(&places, 4_000, |_| Down).len(), 6, "somebody has to find that out");
    }

    #[test]
    fn the_limit_of_pieces_under_way_holds_at_it_and_one_past_it() {
        let mut spread = Spread::new(&[place(0, 2, 100, 0, 0)]);
        let sent: Vec<_> = std::iter::from_fn(|| spread.next(1, |_| Healthy, some_instant())).collect();
        assert_eq!(sent.len(), UNDER_WAY_MAX as usize);
        spread.ended(sent[0], 1);
        assert!(spread.next(1, |_| Healthy, some_instant()).is_some());
        assert!(spread.next(1, |_| Healthy, some_instant()).is_none());
    }

    #[test]
    fn whoever_turns_a_piece_away_gets_none_until_there_is_room_again() {
        let (now, second) = (some_instant(), Duration::from_secs(1));
        let mut spread = Spread::new(&[place(0, 2, 1, 0, 0), place(1, 90, 1, 0, 0)]);
        let near = spread.next(1, |_| Healthy, now).unwrap();
        assert_eq!((near.as_usize(), spread.opens(now)), (0, None));
        spread.ended(near, 1);
        spread.close(near, now + second);
        assert_eq!(spread.opens(now), Some(now + second));
        let mut next = |now| spread.next(1, |_| Healthy, now).map(RegionIndex::as_usize);
        // The far one instead, as much as it may have; then somebody waits.
        assert_eq!([(); 3].map(|()| next(now)), [Some(1), Some(1), None]);
        assert_eq!(next(now + second - Duration::from_millis(1)), None);
        assert_eq!([(); 3].map(|()| next(now + second)), [Some(0), Some(0), None]);
        assert_eq!(spread.opens(now + second), None);
        // Of two words the later one counts.
        spread.close(near, now + 3 * second);
        spread.close(near, now + 2 * second);
        assert_eq!(spread.opens(now + second), Some(now + 3 * second));
        let open = |at| spread.open_before(at).map(RegionIndex::as_usize).collect::<Vec<_>>();
        assert_eq!((open(now + 2 * second), open(now + 3 * second)), (vec![1], vec![0, 1]));
        spread.close(RegionIndex::new(7).unwrap(), now + 9 * second);
        assert_eq!(spread.opens(now + 3 * second), None, "whoever is no place is nobody's business");
    }

    proptest! {
        /// Invariant 1, Residency, and no piece is left lying: whatever happens, only the given places are asked, and as
        /// long as nothing is under way somebody is, or will be when somebody opens again.
        #[test]
        fn pieces_go_only_to_the_places_that_were_given_and_never_get_stuck(
            given in prop::collection::btree_map(0usize..16, (0u64..300, 1u32..4, 0u64..1 << 40, 0u64..1 << 40), 1..5),
            steps in prop::collection::vec((1u64..1 << 40, 0u64..4, 0usize..16), 1..80),
        ) {
            let places: Vec<_> = given.iter().map(|(at, (rtt, replicas, pending, speed))| place(*at, *rtt, *replicas, *pending, *speed)).collect();
            let mut spread = Spread::new(&places);
            let mut under_way = Vec::new();
            let now = some_instant();
            for (at, (tokens, end, down)) in steps.into_iter().enumerate() {
                let now = now + Duration::from_secs(at as u64);
                let health = |region: RegionIndex| if region.as_usize() == down { Down } else { Healthy };
                match spread.next(tokens, health, now) {
                    Some(region) => {
                        prop_assert!(given.contains_key(&region.as_usize()));
                        under_way.push((region, tokens));
                    }
                    None => prop_assert!(!under_way.is_empty() || spread.opens(now) > Some(now)),
                }
                match (end, under_way.pop()) {
                    (0, Some(under)) => under_way.push(under),
                    (turned_away, Some((region, tokens))) => {
                        spread.ended(region, tokens);
                        if turned_away == 1 {
                            spread.close(region, now + Duration::from_secs(tokens % 5));
                        }
                    }
                    (_, None) => {}
                }
                prop_assert_eq!(spread.under_way() as usize, under_way.len());
            }
        }
    }
}
