/* What a terminal that saw the output so far is set to: modes and which screen, not its content.
 *
 * Enough for two things: to bring the terminal of a new client into the state that the program relies on, and to
 * replay old output without what must not happen again (a terminal would answer old questions into the program's
 * input, set the clipboard, ring). The sequences are those of ECMA-48 and xterm (ctlseqs).
 */

#ifndef RAL_SCREEN_H
#define RAL_SCREEN_H

#include <stddef.h>
#include <stdint.h>

/* DEC private modes that programs leave set; the bit of a mode is its place here. */
static const uint16_t MODE_NUMBERS[] = {1, 7, 25, 1000, 1002, 1003, 1004, 1005, 1006, 1015, 2004};
enum {
    MODES = sizeof MODE_NUMBERS / sizeof *MODE_NUMBERS,
    M_CURSOR_KEYS = 1 << 0,
    M_WRAP = 1 << 1,
    M_CURSOR = 1 << 2,
    M_KEYPAD = 1 << MODES, /* ESC = and ESC > */
    M_DEFAULT = M_WRAP | M_CURSOR,
    MAX_PARAMETERS = 16,
    PRELUDE_BYTES = 256,
};

enum parser_state { GROUND, ESCAPE, ESCAPE_MORE, CSI, STRING, STRING_ESCAPE };

/* What a byte was: text, a control that is left out of a replay, part of a sequence, or the end of one that is
 * repeated or left out in a replay. */
enum seen { TEXT, NOISE, INSIDE, REPEATED, LEFT_OUT };

struct screen {
    uint16_t modes;
    uint16_t alternate; /* the mode that switched to it: 47, 1047, 1049; 0 on the main screen */
    uint8_t state;
    uint8_t marker; /* ? > = < of a CSI; the letter that began a string */
    uint8_t intermediate;
    uint8_t asks; /* a ? among the parameters of an OSC */
    uint8_t count;
    uint16_t parameters[MAX_PARAMETERS];
};

static inline void screen_reset(struct screen *s)
{
    *s = (struct screen){.modes = M_DEFAULT};
}

static void set_mode(struct screen *s, uint16_t number, int on)
{
    if (number == 47 || number == 1047 || number == 1049)
        s->alternate = on ? number : 0;
    for (int index = 0; index < MODES; index++)
        if (MODE_NUMBERS[index] == number)
            s->modes = (uint16_t)(on ? s->modes | 1 << index : s->modes & ~(1 << index));
}

static enum seen end_csi(struct screen *s, uint8_t final)
{
    s->state = GROUND;
    if (s->marker == '?' && !s->intermediate && (final == 'h' || final == 'l'))
        for (int index = 0; index < s->count; index++)
            set_mode(s, s->parameters[index], final == 'h');
    if (s->intermediate == '!' && final == 'p') /* DECSTR */
        s->modes = (uint16_t)((s->modes | M_CURSOR) & ~(M_CURSOR_KEYS | M_KEYPAD));
    /* Device attributes, status reports, window operations, printing, mode and version and keyboard queries */
    int asks = final == 'c' || final == 'n' || final == 't' || final == 'x' || final == 'i'
        || (s->intermediate == '$' && final == 'p') || (s->marker == '>' && final == 'q')
        || (s->marker == '?' && final == 'u');
    return asks ? LEFT_OUT : REPEATED;
}

/* Of strings only titles, hyperlinks and colours are repeated. */
static enum seen end_string(struct screen *s)
{
    s->state = GROUND;
    uint16_t number = s->parameters[0];
    int wanted = number <= 2 || number == 4 || number == 8 || (number >= 10 && number <= 12) || number == 104
        || (number >= 110 && number <= 112);
    return s->marker == ']' && wanted && !s->asks ? REPEATED : LEFT_OUT;
}

static void begin_parameters(struct screen *s, enum parser_state state, uint8_t marker)
{
    s->state = (uint8_t)state;
    s->marker = marker;
    s->intermediate = s->asks = 0;
    s->count = 1;
    s->parameters[0] = 0;
}

static void take_parameter(struct screen *s, uint8_t byte)
{
    if (byte == ';' || byte == ':') {
        if (s->count < MAX_PARAMETERS)
            s->parameters[s->count++] = 0;
    } else if (byte >= '0' && byte <= '9') {
        uint32_t value = s->parameters[s->count - 1] * 10U + (byte - '0');
        s->parameters[s->count - 1] = (uint16_t)(value > 65535 ? 65535 : value);
    }
}

static enum seen step_escape(struct screen *s, uint8_t byte)
{
    if (byte == '[') {
        begin_parameters(s, CSI, 0);
    } else if (byte == ']' || byte == 'P' || byte == 'X' || byte == '^' || byte == '_') {
        begin_parameters(s, STRING, byte);
    } else if (byte >= 0x20 && byte <= 0x2f) {
        s->state = ESCAPE_MORE;
    } else if (byte >= 0x30) {
        s->state = GROUND;
        if (byte == 'c')
            screen_reset(s);
        else if (byte == '=')
            s->modes |= M_KEYPAD;
        else if (byte == '>')
            s->modes = (uint16_t)(s->modes & ~M_KEYPAD);
        return byte == 'Z' ? LEFT_OUT : REPEATED; /* DECID asks */
    }
    return INSIDE;
}

static enum seen step_csi(struct screen *s, uint8_t byte)
{
    if (byte >= 0x40 && byte <= 0x7e)
        return end_csi(s, byte);
    if (byte >= '<' && byte <= '?')
        s->marker = byte;
    else if (byte >= 0x20 && byte <= 0x2f)
        s->intermediate = byte;
    else
        take_parameter(s, byte);
    return INSIDE;
}

static enum seen step_string(struct screen *s, uint8_t byte)
{
    if (byte == 0x07)
        return end_string(s);
    if (byte == '?')
        s->asks = 1;
    if (s->count == 1)
        take_parameter(s, byte); /* the number of an OSC ends at the first semicolon */
    return INSIDE;
}

/* Take one byte of output. */
static enum seen screen_step(struct screen *s, uint8_t byte)
{
    if (byte == 0x18 || byte == 0x1a) { /* CAN, SUB */
        s->state = GROUND;
        return LEFT_OUT;
    }
    if (s->state == STRING_ESCAPE) {
        if (byte == '\\')
            return end_string(s);
        s->state = ESCAPE; /* the string was cut short by another sequence */
    }
    if (byte == 0x1b) {
        s->state = s->state == STRING ? STRING_ESCAPE : ESCAPE;
        return INSIDE;
    }
    switch (s->state) {
    case GROUND: return byte == 0x07 || byte == 0x05 ? NOISE : TEXT; /* BEL, ENQ */
    case ESCAPE: return step_escape(s, byte);
    case ESCAPE_MORE:
        if (byte >= 0x30) {
            s->state = GROUND;
            return REPEATED;
        }
        return INSIDE;
    case CSI: return step_csi(s, byte);
    default: return step_string(s, byte);
    }
}

static uint8_t *put_text(uint8_t *out, const char *text)
{
    while (*text)
        *out++ = (uint8_t)*text++;
    return out;
}

static uint8_t *put_number(uint8_t *out, uint32_t number)
{
    char digits[12];
    int at = sizeof digits - 1;
    digits[at] = 0;
    do
        digits[--at] = (char)('0' + number % 10);
    while (number /= 10);
    return put_text(out, digits + at);
}

static uint8_t *put_mode(uint8_t *out, uint16_t number, int on)
{
    out = put_number(put_text(out, "\033[?"), number);
    return put_text(out, on ? "h" : "l");
}

/* Write what turns a terminal in state `from` into one in state `to`; at most PRELUDE_BYTES. */
static size_t screen_change(const struct screen *from, const struct screen *to, uint8_t *out)
{
    uint8_t *at = out;
    if (from->alternate && !to->alternate)
        at = put_mode(at, from->alternate, 0);
    if (to->alternate) {
        if (!from->alternate)
            at = put_mode(at, to->alternate, 1);
        at = put_text(at, "\033[0m\033[2J\033[H");
    }
    for (int index = 0; index < MODES; index++)
        if ((from->modes ^ to->modes) >> index & 1)
            at = put_mode(at, MODE_NUMBERS[index], to->modes >> index & 1);
    if ((from->modes ^ to->modes) & M_KEYPAD)
        at = put_text(at, to->modes & M_KEYPAD ? "\033=" : "\033>");
    return (size_t)(at - out);
}

#endif
