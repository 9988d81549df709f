//! Somebody's standing, told as what their requests came to.

use super::*;
use crate::some_instant;
use Seen::*;
use proptest::prelude::*;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const MIDDLE: Permille = Permille(500);

struct Story {
    circuits: Circuits<u8>,
    now: Instant,
}

impl Story {
    fn of(count: u8) -> Story {
        let mut circuits = Circuits::default();
        circuits.watch(0..count);
        Story { circuits, now: some_instant() }
    }

    fn saw(&mut self, key: u8, seen: &[Seen]) -> bool {
        seen.iter().fold(false, |_, seen| self.circuits.saw(key, Evidence::of(*seen), MIDDLE, self.now))
    }

    fn after(&mut self, wait: Duration) -> &mut Story {
        self.now += wait;
        self
    }

    fn standing(&self, key: u8) -> Standing {
        self.circuits.standing(key, self.now)
    }

    /// From ejected to returning, by a trial that is answered.
    fn comes_back(&mut self, key: u8) {
        while self.standing(key) != Standing::MayBeTried {
            self.after(100 * MS);
        }
        self.circuits.began(key, self.now);
        assert_eq!(self.standing(key), Standing::OnTrial);
        self.saw(key, &[Answered]);
    }
}

#[test]
fn two_misses_or_three_failures_in_a_row_or_half_of_twenty_in_a_second_eject() {
    let check = |seen: &[Seen], ejected: bool| {
        let mut story = Story::of(2);
        assert_eq!(story.saw(0, seen), ejected, "{seen:?}");
    };
    check(&[Missed], false);
    check(&[Missed, Missed], true);
    check(&[Missed, Answered, Missed], false);
    check(&[Failed, Failed], false);
    check(&[Failed, Failed, Failed], true);
    check(&[Failed, Failed, Answered, Failed], false);
    check(&[Failed, Missed, Failed], false);
    let half = |of: usize| -> Vec<Seen> { [Answered, Faulted].repeat(of / 2) };
    check(&half(18), false);
    check(&half(20), true);
    check(&[Answered, Answered, Faulted].repeat(20), false);
    check(&[Faulted; 19], false);
    check(&[Faulted; 20], true);
}

#[test]
fn a_share_is_counted_within_one_second() {
    let mut story = Story::of(2);
    assert!(!story.saw(0, &[Faulted; 19]));
    assert!(!story.after(WINDOW).saw(0, &[Faulted; 19]));
    assert!(story.after(WINDOW - MS).saw(0, &[Faulted]));
}

/// The fault of the field's breakers: load makes everybody late, and all of them are taken out.
#[test]
fn when_everybody_is_late_nobody_is_ejected() {
    let mut story = Story::of(3);
    for _ in 0..10 {
        for key in 0..3 {
            assert!(!story.saw(key, &[Missed]));
        }
    }
    story.saw(2, &[Answered]);
    assert!(story.saw(0, &[Missed]), "now somebody is above suspicion");
}

#[test]
fn no_more_than_a_third_are_ejected_but_of_two_one_may_go_and_the_last_never() {
    for (count, most) in [(1, 0), (2, 1), (3, 1), (5, 1), (6, 2), (9, 3)] {
        let mut story = Story::of(count);
        let out = (0..count).filter(|key| story.saw(*key, &[Missed, Missed])).count();
        assert_eq!(out, most, "of {count}");
    }
}

#[test]
fn an_ejection_lasts_twice_as_long_each_time_up_to_half_a_minute_give_or_take_a_fifth() {
    let mut story = Story::of(2);
    story.saw(0, &[Missed, Missed]);
    for lasts in [500, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000].map(Duration::from_millis) {
        assert_eq!(story.standing(0), Standing::Ejected { until: story.now + lasts });
        assert!(matches!(story.after(lasts - MS).standing(0), Standing::Ejected { .. }));
        assert_eq!(story.after(MS).standing(0), Standing::MayBeTried);
        story.circuits.began(0, story.now);
        assert!(story.saw(0, &[Missed]), "a trial that fails");
    }
    for (chance, lasts) in [(0, 400), (1000, 600)] {
        let mut story = Story::of(2);
        story.saw(0, &[Missed]);
        story.circuits.saw(0, Evidence::of(Missed), Permille::new(chance), story.now);
        assert_eq!(story.standing(0), Standing::Ejected { until: story.now + lasts * MS });
    }
}

#[test]
fn one_request_tries_and_the_others_stay_away_until_it_has() {
    let mut story = Story::of(2);
    story.saw(0, &[Missed, Missed]);
    story.after(500 * MS);
    assert!(story.standing(0).takes(Permille::new(999)));
    story.circuits.began(0, story.now);
    assert!(!story.standing(0).takes(Permille::new(0)));
    story.circuits.given_up(0, story.now);
    assert_eq!(story.standing(0), Standing::MayBeTried, "its client hung up; another may try");
    story.circuits.began(0, story.now);
    assert_eq!(story.after(TRIAL_MAX - MS).standing(0), Standing::OnTrial);
    assert_eq!(story.after(MS).standing(0), Standing::MayBeTried, "nobody told its end");
    story.circuits.began(0, story.now);
    story.circuits.overtaken(0, MIDDLE, story.now);
    assert_eq!(
        story.standing(0),
        Standing::Ejected { until: story.now + SECOND },
        "whoever was slower has not passed"
    );
    story.circuits.overtaken(1, MIDDLE, story.now);
    assert_eq!(story.standing(1), Standing::Closed, "to lose a race is no failure");
}

#[test]
fn whoever_is_back_gets_a_share_that_grows() {
    let mut story = Story::of(2);
    story.saw(0, &[Missed, Missed]);
    story.comes_back(0);
    let share = |story: &Story| match story.standing(0) {
        Standing::Returning { share } => share.get(),
        other => panic!("{other:?}"),
    };
    assert_eq!(share(&story), 100);
    story.after(RETURN_LASTS / 2);
    assert_eq!(share(&story), 550);
    assert!(story.standing(0).takes(Permille::new(549)) && !story.standing(0).takes(Permille::new(550)));
    assert_eq!(story.after(RETURN_LASTS / 2).standing(0), Standing::Closed);
}

#[test]
fn a_flapping_target_is_remembered_for_a_minute_of_health() {
    for (well, lasts) in [(RETURN_LASTS, 1000), (RETURN_LASTS + FORGOTTEN_AFTER, 500)] {
        let mut story = Story::of(2);
        story.saw(0, &[Missed, Missed]);
        story.comes_back(0);
        story.after(RETURN_LASTS).saw(0, &[Answered]);
        story.after(well).saw(0, &[Answered]);
        story.saw(0, &[Missed, Missed]);
        assert_eq!(story.standing(0), Standing::Ejected { until: story.now + lasts * MS }, "{well:?}");
    }
}

fn any_seen() -> impl Strategy<Value = Seen> {
    prop::sample::select(vec![Answered, Faulted, Failed, Missed])
}

proptest! {
    #[test]
    fn whatever_happens_somebody_is_left_and_the_cap_holds(
        count in 1u8..10,
        events in prop::collection::vec((0u8..10, any_seen(), 0u16..=1000, 0u32..400), 0..300),
    ) {
        let mut story = Story::of(count);
        for (key, seen, chance, wait_ms) in events {
            story.after(wait_ms * MS);
            let key = key % count;
            story.circuits.began(key, story.now);
            story.circuits.saw(key, Evidence::of(seen), Permille::new(chance), story.now);
            let out = (0..count).filter(|key| matches!(
                story.standing(*key),
                Standing::Ejected { .. } | Standing::MayBeTried | Standing::OnTrial
            )).count();
            prop_assert!(out <= (usize::from(count) / 3).max(1) && out < usize::from(count));
        }
    }
}
