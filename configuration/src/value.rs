//! Values of keys: types that can be read from a file.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::{RangeFrom, RangeInclusive};
use std::path::PathBuf;
use std::time::Duration;

use toml::Spanned;

use crate::document::segment;
use crate::duration;
use crate::section::{ConfigField, ConfigValue, Rule};

/// Limits of a number, a duration, or the length of a list.
#[derive(Clone, Debug)]
pub struct Limits<T> {
    min: Option<T>,
    max: Option<T>,
}

impl<T> Default for Limits<T> {
    fn default() -> Limits<T> {
        Limits { min: None, max: None }
    }
}

impl<T> From<RangeInclusive<T>> for Limits<T> {
    fn from(range: RangeInclusive<T>) -> Limits<T> {
        let (min, max) = range.into_inner();
        Limits { min: Some(min), max: Some(max) }
    }
}

impl<T> From<RangeFrom<T>> for Limits<T> {
    fn from(range: RangeFrom<T>) -> Limits<T> {
        Limits { min: Some(range.start), max: None }
    }
}

impl<T: PartialOrd> Limits<T> {
    fn allow(&self, value: &T) -> bool {
        self.min.as_ref().is_none_or(|min| value >= min) && self.max.as_ref().is_none_or(|max| value <= max)
    }
}

impl<T: ConfigValue> Limits<T> {
    /// Returns the limits as the continuation of `a number`.
    fn phrase(&self) -> String {
        match self {
            Limits { min: Some(_), max: Some(_) } => format!(" from {self}"),
            Limits { min: None, max: None } => String::new(),
            _ => format!(", {self}"),
        }
    }
}

impl<T: ConfigValue> fmt::Display for Limits<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.min, &self.max) {
            (Some(min), Some(max)) => write!(f, "{} to {}", min.written(), max.written()),
            (Some(min), None) => write!(f, "{} or more", min.written()),
            (None, Some(max)) => write!(f, "at most {}", max.written()),
            (None, None) => Ok(()),
        }
    }
}

/// Absence of limits, for types that have none.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoLimit;

impl fmt::Display for NoLimit {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ok(())
    }
}

/// Returns at most 64 characters of a text for a message.
fn shown(text: &str) -> String {
    text.chars().take(64).collect()
}

/// Reads a text with [`std::str::FromStr`]; its error states problem and fix.
pub fn text_of<T: ConfigValue<Item = T> + std::str::FromStr<Err: fmt::Display>>(
    field: &ConfigField<'_>,
    rule: &Rule<T>,
) -> Option<T> {
    let value = field.text()?.parse().map_err(|error| field.problem(error)).ok()?;
    field.checked(value, rule.check)
}

/// Implements [`ConfigValue`] for types that are written as strings: their `FromStr` states problem and fix.
#[macro_export]
macro_rules! text_values {
    ($($type:ty = $name:expr),* $(,)?) => {$(
        impl $crate::ConfigValue for $type {
            type Limit = $crate::NoLimit;
            type Item = $type;

            fn type_name() -> String {
                $name.to_string()
            }

            fn read(field: &$crate::ConfigField<'_>, rule: &$crate::Rule<Self>) -> Option<Self> {
                $crate::text_of(field, rule)
            }

            fn written(&self) -> String {
                format!("\"{self}\"")
            }
        }
    )*};
}

/// Defines an enum whose variants are words in a file.
#[macro_export]
macro_rules! words {
    ($(#[doc = $about:literal])* $vis:vis enum $name:ident {
        $($(#[doc = $doc:literal])* $variant:ident = $word:literal),* $(,)?
    }) => {
        $(#[doc = $about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $vis enum $name { $($(#[doc = $doc])* $variant),* }

        impl $name {
            const WORDS: &[(&'static str, $name)] = &[$(($word, $name::$variant)),*];
        }

        impl std::str::FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<$name, String> {
                let known = $name::WORDS.iter().find(|(word, _)| *word == text);
                known.map(|(_, value)| *value).ok_or_else(|| {
                    let near = $crate::did_you_mean(text, $name::WORDS.iter().map(|(word, _)| *word));
                    format!("{text:?} is unknown{near}; write {}", <$name as $crate::ConfigValue>::type_name())
                })
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let known = $name::WORDS.iter().find(|(_, value)| value == self);
                f.write_str(known.map_or("", |(word, _)| *word))
            }
        }

        $crate::text_values! {
            $name = $name::WORDS.iter().map(|(word, _)| format!("{word:?}")).collect::<Vec<_>>().join(" or ")
        }
    };
}

macro_rules! numbers {
    ($($type:ty),*) => {$(
        impl ConfigValue for $type {
            type Limit = Limits<$type>;
            type Item = $type;

            fn type_name() -> String {
                "whole number".to_owned()
            }

            fn read(field: &ConfigField<'_>, rule: &Rule<$type>) -> Option<$type> {
                let mut limit = rule.limit.clone();
                limit.min.get_or_insert(0);
                if <$type>::BITS <= 32 {
                    limit.max.get_or_insert(<$type>::MAX);
                }
                let fix = format!("a whole number{}{}", limit.phrase(), rule.hint());
                let number = field.number::<$type>(&fix, false)?;
                if !limit.allow(&number) {
                    field.problem(format!("{number} is out of range; write {fix}"));
                    return None;
                }
                field.checked(number, rule.check)
            }

            fn written(&self) -> String {
                self.to_string()
            }
        }
    )*};
}

numbers!(u8, u16, u32, u64, usize, i64);

impl ConfigValue for f64 {
    type Limit = Limits<f64>;
    type Item = f64;

    fn type_name() -> String {
        "number".to_owned()
    }

    fn read(field: &ConfigField<'_>, rule: &Rule<f64>) -> Option<f64> {
        let fix = format!("a number{}{}", rule.limit.phrase(), rule.hint());
        let number = field.number::<f64>(&fix, true)?;
        if !rule.limit.allow(&number) {
            field.problem(format!("{number} is out of range; write {fix}"));
            return None;
        }
        field.checked(number, rule.check)
    }

    fn written(&self) -> String {
        self.to_string()
    }
}

impl ConfigValue for bool {
    type Limit = NoLimit;
    type Item = bool;

    fn type_name() -> String {
        "true or false".to_owned()
    }

    fn read(field: &ConfigField<'_>, _: &Rule<bool>) -> Option<bool> {
        let value = field.value.get_ref().as_bool();
        if value.is_none() {
            field.wrong_type("true or false, without quotes");
        }
        value
    }

    fn written(&self) -> String {
        self.to_string()
    }
}

impl ConfigValue for Duration {
    type Limit = Limits<Duration>;
    type Item = Duration;

    fn type_name() -> String {
        "duration".to_owned()
    }

    fn read(field: &ConfigField<'_>, rule: &Rule<Duration>) -> Option<Duration> {
        let (limit, hint) = (rule.limit.phrase(), rule.hint());
        let fix = format!("a duration{limit}, such as \"500ms\", \"10s\", \"2m\" or \"7d\"{hint}");
        let Some(text) = field.value.get_ref().as_str() else {
            field.wrong_type(&fix);
            return None;
        };
        let Some(time) = duration::parse(text) else {
            field.problem(format!("{:?} is not a duration; write {fix}", shown(text)));
            return None;
        };
        if !rule.limit.allow(&time) {
            field.problem(format!("{text:?} is out of range; write {fix}"));
            return None;
        }
        field.checked(time, rule.check)
    }

    fn written(&self) -> String {
        format!("\"{}\"", duration::write(*self))
    }
}

impl ConfigValue for String {
    type Limit = NoLimit;
    type Item = String;

    fn type_name() -> String {
        "string".to_owned()
    }

    fn read(field: &ConfigField<'_>, rule: &Rule<String>) -> Option<String> {
        field.checked(field.text()?.to_owned(), rule.check)
    }

    fn written(&self) -> String {
        format!("{:?}", shown(self))
    }
}

impl ConfigValue for PathBuf {
    type Limit = NoLimit;
    type Item = PathBuf;

    fn type_name() -> String {
        "path".to_owned()
    }

    fn read(field: &ConfigField<'_>, rule: &Rule<PathBuf>) -> Option<PathBuf> {
        let text = field.text()?;
        if text.is_empty() || text.contains('\0') {
            field.problem(format!("{:?} is not a path; write the path of a file or a folder", shown(text)));
            return None;
        }
        field.checked(text.into(), rule.check)
    }

    fn written(&self) -> String {
        format!("{:?}", self.display().to_string())
    }
}

impl ConfigValue for SocketAddr {
    type Limit = NoLimit;
    type Item = SocketAddr;

    fn type_name() -> String {
        "address".to_owned()
    }

    fn read(field: &ConfigField<'_>, rule: &Rule<SocketAddr>) -> Option<SocketAddr> {
        let text = field.text()?;
        let Ok(address) = text.parse() else {
            let fix = "write \"IP:PORT\", such as \"127.0.0.1:8080\"";
            field.problem(format!("{:?} is not an address; {fix}", shown(text)));
            return None;
        };
        field.checked(address, rule.check)
    }

    fn written(&self) -> String {
        format!("\"{self}\"")
    }
}

impl ConfigValue for IpAddr {
    type Limit = NoLimit;
    type Item = IpAddr;

    fn type_name() -> String {
        "IP address".to_owned()
    }

    fn read(field: &ConfigField<'_>, rule: &Rule<IpAddr>) -> Option<IpAddr> {
        let text = field.text()?;
        let Ok(address) = text.parse() else {
            let fix = "write one such as \"10.0.0.7\", without a port";
            field.problem(format!("{:?} is not an IP address; {fix}", shown(text)));
            return None;
        };
        field.checked(address, rule.check)
    }

    fn written(&self) -> String {
        format!("\"{self}\"")
    }
}

impl<T: ConfigValue> ConfigValue for Option<T> {
    type Limit = T::Limit;
    type Item = T::Item;

    fn type_name() -> String {
        T::type_name()
    }

    fn read(field: &ConfigField<'_>, rule: &Rule<Option<T>>) -> Option<Option<T>> {
        T::read(field, &rule.same()).map(Some)
    }

    fn absent() -> Option<Option<T>> {
        Some(None)
    }

    fn section() -> Option<(&'static str, Vec<crate::Key>)> {
        T::section()
    }
}

/// Reads all items of a list, and checks their number.
fn list<L: ConfigValue<Limit = Limits<usize>>, T: ConfigValue<Item = L::Item>>(
    field: &ConfigField<'_>,
    fix: &str,
    rule: &Rule<L>,
) -> Option<Vec<T>> {
    let items = field.items(fix)?;
    if !rule.limit.allow(&items.len()) {
        let fix = match rule.limit {
            Limits { min: Some(0), max: Some(max) } => format!("write at most {max}"),
            ref limit => format!("write {limit}"),
        };
        field.problem(format!("has {} entries; {fix}{}", items.len(), rule.hint()));
        return None;
    }
    let read: Vec<_> = items.iter().map(|item| T::read(item, &rule.items())).collect();
    read.into_iter().collect()
}

impl<T: ConfigValue> ConfigValue for Vec<T> {
    type Limit = Limits<usize>;
    type Item = T::Item;

    fn type_name() -> String {
        match T::section() {
            Some(_) => "list of tables".to_owned(),
            None => format!("list of: {}", T::type_name()),
        }
    }

    fn read(field: &ConfigField<'_>, rule: &Rule<Vec<T>>) -> Option<Vec<T>> {
        let fix = match T::section() {
            Some(_) => format!("a list: [[{}]] above each table", field.path),
            None => "a list in brackets".to_owned(),
        };
        list(field, &fix, rule)
    }

    fn section() -> Option<(&'static str, Vec<crate::Key>)> {
        T::section()
    }

    fn written(&self) -> String {
        let items: Vec<_> = self.iter().map(ConfigValue::written).collect();
        format!("[{}]", items.join(", "))
    }
}

/// One value, or a list of values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OneOrMany<T>(pub Vec<T>);

impl<T: ConfigValue> ConfigValue for OneOrMany<T> {
    type Limit = Limits<usize>;
    type Item = T::Item;

    fn type_name() -> String {
        format!("{}, or a list", T::type_name())
    }

    fn read(field: &ConfigField<'_>, rule: &Rule<OneOrMany<T>>) -> Option<OneOrMany<T>> {
        if !field.value.get_ref().is_array() {
            return T::read(field, &rule.items()).map(|one| OneOrMany(vec![one]));
        }
        list(field, "", rule).map(OneOrMany)
    }
}

/// Table whose keys are names: each key with its value, in the order of the parser's tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows<T>(pub Vec<(String, Option<T>)>);

impl<T: ConfigValue> ConfigValue for Rows<T> {
    type Limit = NoLimit;
    type Item = T::Item;

    fn type_name() -> String {
        match T::section() {
            Some(_) => "table of tables".to_owned(),
            None => format!("table of: {}", T::type_name()),
        }
    }

    fn read(field: &ConfigField<'_>, rule: &Rule<Rows<T>>) -> Option<Rows<T>> {
        let table = field.table()?;
        let row = |(key, value): (&Spanned<toml::de::DeString<'_>>, _)| {
            let key = key.get_ref().to_string();
            let path = format!("{}.{}", field.path, segment(&key));
            let field = ConfigField { document: field.document, path, value };
            (key, T::read(&field, &rule.items()))
        };
        Some(Rows(table.entries.iter().map(row).collect()))
    }

    fn section() -> Option<(&'static str, Vec<crate::Key>)> {
        T::section()
    }
}
