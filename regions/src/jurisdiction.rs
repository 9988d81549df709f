//! Jurisdictions: the territories whose law applies to a region.
//!
//! Three kinds nest: a subdivision (`us-va`, ISO 3166-2) lies in a country (`us`, ISO 3166-1 alpha-2), and a country in
//! unions (`eu`, `eea`), whose members the catalogue lists. The code of a subdivision contains its country, so that no
//! table can contradict it; only unions need a table. ISO writes its codes in capitals; this module accepts either case
//! and treats `EU` and `eu` as one code.
//!
//! The jurisdiction of a region is where its machines are. It is never derived from a client's address.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The officially assigned alpha-2 codes of ISO 3166-1.
const COUNTRIES: &str = "\
    ad ae af ag ai al am ao aq ar as at au aw ax az ba bb bd be bf bg bh bi bj bl bm bn bo bq br bs bt bv bw by bz \
    ca cc cd cf cg ch ci ck cl cm cn co cr cu cv cw cx cy cz de dj dk dm do dz ec ee eg eh er es et fi fj fk fm fo fr \
    ga gb gd ge gf gg gh gi gl gm gn gp gq gr gs gt gu gw gy hk hm hn hr ht hu id ie il im in io iq ir is it je jm jo jp \
    ke kg kh ki km kn kp kr kw ky kz la lb lc li lk lr ls lt lu lv ly ma mc md me mf mg mh mk ml mm mn mo mp mq mr ms mt \
    mu mv mw mx my mz na nc ne nf ng ni nl no np nr nu nz om pa pe pf pg ph pk pl pm pn pr ps pt pw py qa re ro rs ru rw \
    sa sb sc sd se sg sh si sj sk sl sm sn so sr ss st sv sx sy sz tc td tf tg th tj tk tl tm tn to tr tt tv tw tz \
    ua ug um us uy uz va vc ve vg vi vn vu wf ws ye yt za zm zw";

/// Country, subdivision of a country, or union of countries, by its code in lower case.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Jurisdiction(Arc<str>);

/// Error for a text that is not the code of a jurisdiction.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{given}` is not a jurisdiction: write a country (de), a subdivision (us-va) or a union (eu) by its short code"
)]
pub struct JurisdictionError {
    /// Given text, cut to a printable length.
    pub given: String,
}

impl Jurisdiction {
    /// Returns the code, such as `us-va`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the country that the code names or lies in; `None` for a union.
    pub fn country(&self) -> Option<Jurisdiction> {
        let country = self.0.split('-').next()?;
        COUNTRIES.split(' ').any(|known| known == country).then(|| Jurisdiction(country.into()))
    }

    /// Returns whether this is a country.
    pub fn is_country(&self) -> bool {
        self.country().as_ref() == Some(self)
    }

    /// Returns whether this can only be a union: neither a country nor part of one.
    pub fn is_union(&self) -> bool {
        !self.0.contains('-') && self.country().is_none()
    }
}

impl FromStr for Jurisdiction {
    type Err = JurisdictionError;

    fn from_str(text: &str) -> Result<Jurisdiction, JurisdictionError> {
        // "anywhere" is the text form of a policy without conditions, so no union may have that name.
        let well_formed = match text.split_once('-') {
            None => is_letters(text, 2..=8) && !text.eq_ignore_ascii_case("anywhere"),
            Some((country, part)) => {
                is_letters(country, 2..=2)
                    && (1..=3).contains(&part.len())
                    && part.bytes().all(|byte| byte.is_ascii_alphanumeric())
            }
        };
        if well_formed {
            Ok(Jurisdiction(text.to_ascii_lowercase().into()))
        } else {
            Err(JurisdictionError { given: text.chars().take(32).collect() })
        }
    }
}

fn is_letters(text: &str, len: std::ops::RangeInclusive<usize>) -> bool {
    len.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphabetic())
}

impl fmt::Display for Jurisdiction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Debug for Jurisdiction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_countries_is_complete_and_sorted() {
        let countries: Vec<&str> = COUNTRIES.split(' ').collect();
        assert_eq!(countries.len(), 249);
        assert!(countries.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn a_code_determines_its_country() {
        let cases = [
            ("de", Some("de"), true, false),
            ("DE", Some("de"), true, false),
            ("us-va", Some("us"), false, false),
            ("eu", None, false, true),
            ("eea", None, false, true),
            ("zz-1", None, false, false),
        ];
        for (code, country, is_country, is_union) in cases {
            let jurisdiction: Jurisdiction = code.parse().unwrap();
            assert_eq!(jurisdiction.country().as_ref().map(Jurisdiction::as_str), country, "{code}");
            assert_eq!(
                (jurisdiction.is_country(), jurisdiction.is_union()),
                (is_country, is_union),
                "{code}"
            );
        }
    }

    #[test]
    fn an_invalid_code_is_rejected_with_the_three_kinds_of_code() {
        for text in
            ["", "d", "anywhere", "europeans", "u5", "usa-va", "us-", "us-virg", "us-v a", "aws/us-east-1"]
        {
            let error = text.parse::<Jurisdiction>().unwrap_err();
            assert!(error.to_string().contains("a union (eu)"), "{text}: {error}");
        }
    }
}
